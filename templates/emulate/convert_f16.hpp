// Two float32 to two float16, `lo` in the lower half; there is no bf16 before sm80.

static inline u32 float_bits(float x) { return emu::to_bits(x); }

static inline u32 pack_f16(float lo, float hi) { return emu::to_f16(lo) | emu::to_f16(hi) << 16; }
