// Two float32 to two 16-bit floats, `lo` in the lower half.

static inline u32 float_bits(float x) { return emu::to_bits(x); }

static inline u32 pack_bf16(float lo, float hi) { return emu::to_bf16(lo) | emu::to_bf16(hi) << 16; }

static inline u32 pack_f16(float lo, float hi) { return emu::to_f16(lo) | emu::to_f16(hi) << 16; }
