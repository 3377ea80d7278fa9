// The special-function unit (PTX ISA, "ex2.approx.ftz.f32", "lg2.approx.ftz.f32", "tanh.approx.f32").

extern "C" {
float exp2f(float);
float log2f(float);
float tanhf(float);
}

namespace emu {

// .ftz: a subnormal, as input or result, becomes a zero of its sign.
static inline float flush(float x) { return fabsf(x) < 0x1p-126f ? x * 0.0f : x; }

}  // namespace emu

static inline float exp2_approx(float x) { return emu::flush(exp2f(emu::flush(x))); }

static inline float log2_approx(float x) { return emu::flush(log2f(emu::flush(x))); }

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
