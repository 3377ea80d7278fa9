// Atomic addition to global memory (PTX ISA, "red.global.add.f32"): blocks of other OS threads add to the same words.

namespace emu {

static inline void atomic_add(float* ptr, float value) {
    u32* word = reinterpret_cast<u32*>(ptr);
    u32 seen = __atomic_load_n(word, __ATOMIC_RELAXED), sum;
    do {
        float old;
        memcpy(&old, &seen, 4);
        old += value;
        memcpy(&sum, &old, 4);
    } while (!__atomic_compare_exchange_n(word, &seen, sum, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

}  // namespace emu

static inline void red_global_add_f32(float* ptr, float v, int line = __builtin_LINE()) {
    emu::check_global(*emu::current, ptr, 4, true, line);
    emu::atomic_add(ptr, v);
}

static inline void red_global_add_f32x4(float* ptr, const float (&v)[4], int line = __builtin_LINE()) {
    emu::check_global(*emu::current, ptr, 16, true, line);
    for (int i = 0; i < 4; i++) emu::atomic_add(ptr + i, v[i]);
}
