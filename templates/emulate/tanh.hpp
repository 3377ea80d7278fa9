// PTX ISA, "tanh.approx.f32".

extern "C" float tanhf(float);

// The hardware's relative error is up to 2^-11. Rounding to 11 significant bits errs as much, so that what a test
// tolerates here it will meet on a card.
static inline float tanh_approx(float x) {
    const float y = tanhf(x);
    u32 bits;
    memcpy(&bits, &y, 4);
    if (!(fabsf(y) >= 0x1p-126f)) return y;  // NaN; a subnormal has no 11 bits to keep
    bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
    float rounded;
    memcpy(&rounded, &bits, 4);
    return rounded;
}
