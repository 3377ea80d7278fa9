// Atomic operations (PTX ISA, "atom.global.add.u32"): blocks of other OS threads use the same words.

static inline u32 atom_global_add_u32(u32* ptr, u32 v, int line = __builtin_LINE()) {
    emu::check_global(*emu::current, ptr, 4, true, line);
    return __atomic_fetch_add(ptr, v, __ATOMIC_RELAXED);
}
