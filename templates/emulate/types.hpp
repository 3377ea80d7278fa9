using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

namespace emu {

static inline float from_bits(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline float from_bf16(u32 bits) { return from_bits(bits << 16); }

// Exponent and mantissa move to their places, and a multiplication by 2^112 mends the bias, of subnormals too.
static inline float from_f16(u32 bits) {
    const float magnitude = from_bits((bits & 0x7fff) << 13) * from_bits(0x77800000);
    u32 result;
    memcpy(&result, &magnitude, 4);
    const u32 special = (bits & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;  // inf or NaN: the largest exponent
    return from_bits(result | special | (bits & 0x8000) << 16);
}

// The other way (PTX ISA, "cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32", "cvt.rn.f16.f32"): rounded to nearest even. NaN
// becomes the canonical 0x7fff; what is too large for a float16 becomes an infinity.

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
