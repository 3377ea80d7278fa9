// Two 16-bit floats to two float32, exactly (PTX ISA, "cvt.f32.f16"; bf16 is the upper half of a float32).

static inline void unpack_bf16(float& lo, float& hi, u32 v) {
    lo = emu::from_bf16(v & 0xffff);
    hi = emu::from_bf16(v >> 16);
}

static inline void unpack_f16(float& lo, float& hi, u32 v) {
    lo = emu::from_f16(v & 0xffff);
    hi = emu::from_f16(v >> 16);
}
