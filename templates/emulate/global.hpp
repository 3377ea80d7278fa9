// Global memory: each access must lie within one of the tensors that the launch names, and be aligned to its size.

namespace emu {

static inline bool holds(const Range& range, u64 address, u32 bytes) {
    return range.bytes >= bytes && address - range.address <= range.bytes - bytes;
}

__attribute__((noinline)) static void find_range(Fiber& self, u64 address, u32 bytes, bool write, int line) {
    Block& block = *self.block;
    const Launch& launch = *block.launch;
    const char* doing = write ? "writes" : "reads";
    if (address % bytes)
        fault(self, line, "%s %u bytes of global memory at 0x%llx, which is misaligned: it must be a multiple of %u.",
              doing, bytes, address, bytes);
    bool read_only = false;
    u32 nearest = 0;
    u64 least = ~0ull;
    for (u32 i = 0; i < launch.n_ranges; i++) {
        const Range& range = launch.ranges[i];
        const bool whole = holds(range, address, bytes);
        if (whole && (!write || range.writable)) {
            block.hot_range = range;
            return;
        }
        read_only |= whole;
        const u64 distance = whole                      ? 0
                             : holds(range, address, 1) ? 1
                             : address < range.address  ? 2 + range.address - address
                                                        : 2 + address - range.address - range.bytes;
        if (distance < least) {
            least = distance;
            nearest = i;
        }
    }
    if (!launch.n_ranges)
        fault(self, line, "%s %u bytes of global memory at 0x%llx: the launch was given no tensor.", doing, bytes,
              address);
    const Range& range = launch.ranges[nearest];
    fault(self, line,
          "%s %u bytes of global memory %s: byte %lld of range %u (%llu bytes, %s), address 0x%llx.\n  Look for %s.",
          doing, bytes, read_only ? "that is read-only" : "out of bounds", (long long)(address - range.address),
          nearest, range.bytes, range.writable ? "writable" : "read-only", address,
          read_only ? "an output pointer that is an input" : "a missing bounds check, or a wrong stride or offset");
}

static inline void check_global(Fiber& self, const void* pointer, u32 bytes, bool write, int line) {
    const u64 address = (u64)pointer;
    const Range& hot = self.block->hot_range;
    if (__builtin_expect(!holds(hot, address, bytes) || address % bytes || (write && !hot.writable), 0))
        find_range(self, address, bytes, write, line);
}

// Blocks of other OS threads add to the same words.
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

static inline float ld_global_f32(const void* ptr, int line = __builtin_LINE()) {
    emu::check_global(*emu::current, ptr, 4, false, line);
    float v;
    memcpy(&v, ptr, 4);
    return v;
}

static inline void ld_global_f32x4(float (&v)[4], const void* ptr, int line = __builtin_LINE()) {
    emu::check_global(*emu::current, ptr, 16, false, line);
    memcpy(v, ptr, 16);
}

static inline u32 ld_global_b32(const void* ptr, int line = __builtin_LINE()) {
    emu::check_global(*emu::current, ptr, 4, false, line);
    u32 v;
    memcpy(&v, ptr, 4);
    return v;
}

static inline u64 ld_global_b64(const void* ptr, int line = __builtin_LINE()) {
    emu::check_global(*emu::current, ptr, 8, false, line);
    u64 v;
    memcpy(&v, ptr, 8);
    return v;
}

static inline void st_global_f32(void* ptr, float v, int line = __builtin_LINE()) {
    emu::check_global(*emu::current, ptr, 4, true, line);
    memcpy(ptr, &v, 4);
}

static inline void st_global_b32(void* ptr, u32 v, int line = __builtin_LINE()) {
    emu::check_global(*emu::current, ptr, 4, true, line);
    memcpy(ptr, &v, 4);
}

static inline void st_global_b128(void* ptr, const u32 (&v)[4], int line = __builtin_LINE()) {
    emu::check_global(*emu::current, ptr, 16, true, line);
    memcpy(ptr, v, 16);
}

static inline void ld_global_b128(u32 (&v)[4], const void* ptr, int line = __builtin_LINE()) {
    emu::check_global(*emu::current, ptr, 16, false, line);
    memcpy(v, ptr, 16);
}
