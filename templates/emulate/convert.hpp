// Two float32 to two 16-bit floats (PTX ISA, "cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"): rounded to nearest even, `lo` in
// the lower half. NaN becomes the canonical 0x7fff; what is too large for a float16 becomes an infinity.

namespace emu {

static inline u32 to_bits(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline u32 to_bf16(float value) {
    const u32 bits = to_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static inline u32 to_f16(float value) {
    const u32 bits = to_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7fff;
    if (magnitude >= 0x47800000) return sign | 0x7c00;  // 2^16 and more
    if (magnitude < 0x38800000) {
        // Below 2^-14 the result is subnormal, a multiple of 2^-24: adding 0.5 makes the float32 adder round to those.
        const float half = 0.5f;
        float sum;
        memcpy(&sum, &magnitude, 4);
        sum += half;
        return sign | (to_bits(sum) - to_bits(half));
    }
    // The bias falls from 127 to 15 and 13 mantissa bits go; a carry into the exponent, up to infinity, is right.
    return sign | (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
}

}  // namespace emu

static inline u32 float_bits(float x) { return emu::to_bits(x); }

static inline u32 pack_bf16(float lo, float hi) { return emu::to_bf16(lo) | emu::to_bf16(hi) << 16; }

static inline u32 pack_f16(float lo, float hi) { return emu::to_f16(lo) | emu::to_f16(hi) << 16; }
