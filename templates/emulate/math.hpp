// The special-function unit (PTX ISA, "ex2.approx.ftz.f32", "lg2.approx.ftz.f32", "rcp.approx.ftz.f32").

extern "C" {
float exp2f(float);
float log2f(float);
}

namespace emu {

// .ftz: a subnormal, as input or result, becomes a zero of its sign.
static inline float flush(float x) { return fabsf(x) < 0x1p-126f ? x * 0.0f : x; }

}  // namespace emu

static inline float exp2_approx(float x) { return emu::flush(exp2f(emu::flush(x))); }

static inline float log2_approx(float x) { return emu::flush(log2f(emu::flush(x))); }

static inline float rcp_approx(float x) { return emu::flush(1.0f / emu::flush(x)); }
