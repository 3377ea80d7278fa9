// Atomic addition to global memory (PTX ISA, "red.global.add.f32").

static inline void red_global_add_f32(float* ptr, float v, int line = __builtin_LINE()) {
    emu::check_global(*emu::current, ptr, 4, true, line);
    emu::atomic_add(ptr, v);
}

static inline void red_global_add_f32x4(float* ptr, const float (&v)[4], int line = __builtin_LINE()) {
    emu::check_global(*emu::current, ptr, 16, true, line);
    for (int i = 0; i < 4; i++) emu::atomic_add(ptr + i, v[i]);
}
