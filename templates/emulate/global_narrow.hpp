// Global memory, elements of less than a word, the rest of the register zero.

static inline u32 ld_global_b8(const void* ptr, int line = __builtin_LINE()) {
    emu::check_global(*emu::current, ptr, 1, false, line);
    unsigned char v;
    memcpy(&v, ptr, 1);
    return v;
}

static inline u32 ld_global_b16(const void* ptr, int line = __builtin_LINE()) {
    emu::check_global(*emu::current, ptr, 2, false, line);
    u16 v;
    memcpy(&v, ptr, 2);
    return v;
}
