// Shared memory by 32-bit addresses, with the checks of its shadow. A read must be of words that are written, have
// landed and are ordered before it; a write must be ordered after all other accesses. What orders two threads is a
// barrier of both, __syncthreads or, in one warp, __syncwarp: ldmatrix, mma and shuffles order nothing (PTX ISA,
// "Memory Consistency Model": only barriers and fences do).

namespace emu {

// Whether an access that thread `other` made at `tick` is ordered before one that `self` makes now.
static inline bool ordered_before(const Fiber& self, u32 other, u32 tick) {
    return tick < self.block->ordered || other == thread_of(self) ||
           (other / LANES == self.warp->index && tick < self.warp->ordered);
}

static const char* missing_barrier(const Fiber& self, u32 other) {
    return other / LANES == self.warp->index ? "__syncwarp() or __syncthreads()" : "__syncthreads()";
}

__attribute__((noreturn, noinline, cold)) static void race(const Fiber& self, const char* kind, const char* doing,
                                                           u32 word, u32 other, const char* did, u32 other_line,
                                                           int line) {
    fault(self, line,
          "%s race: %s shared byte %u, which warp %u, lane %u %s at line %u, with no barrier in between.\n  Look for a "
          "missing %s.",
          kind, doing, word * 4, other / LANES, other % LANES, did, other_line, missing_barrier(self, other));
}

// A read that is not covered by a write before the last __syncthreads: fine only if thread or warp order covers it.
__attribute__((noinline)) static void check_read(const Fiber& self, u32 word, int line) {
    const Block& block = *self.block;
    const Word& w = block.shadow[word];
    if (w.write_tick == IN_FLIGHT)
        fault(self, line,
              "reads shared byte %u, to which warp %u, lane %u issued an asynchronous copy at line %u that has not "
              "landed.\n  Look for a missing cp_async_wait (in the issuing thread, then __syncthreads()), or one that "
              "waits for too few groups.",
              word * 4, w.writer / LANES, w.writer % LANES, w.write_line);
    if (w.write_tick < block.started)
        fault(
            self, line,
            "reads shared byte %u (of %u), which no thread has written.\n  Look for a tile that is not loaded, or not "
            "loaded whole.",
            word * 4, block.launch->shared_bytes);
    if (!ordered_before(self, w.writer, w.write_tick))
        race(self, "read-after-write", "reads", word, w.writer, "wrote", w.write_line, line);
}

// Adds a reader to those since the last __syncthreads.
static inline void add_reader(const Fiber& self, Word& w, int line) {
    const u32 thread = thread_of(self), warp = self.warp->index;
    const bool one_warp = w.reader / LANES == w.other_reader / LANES;
    const bool mine = one_warp && w.reader / LANES == warp;
    if (w.read_tick < self.block->ordered || (mine && w.read_tick < self.warp->ordered)) {
        w.reader = w.other_reader = (u16)thread;
        w.read_tick = self.block->tick;
        w.read_line = (u16)line;
    } else if (mine ? w.reader == w.other_reader : one_warp) {
        w.other_reader = (u16)thread;
    }
}

static void check_write(const Fiber& self, u32 word, int line) {
    const Block& block = *self.block;
    const Word& w = block.shadow[word];
    if (w.write_tick == IN_FLIGHT)
        fault(self, line,
              "writes shared byte %u, to which warp %u, lane %u issued an asynchronous copy at line %u that has not "
              "landed.\n  Look for a missing cp_async_wait, or a stage that is filled again too early.",
              word * 4, w.writer / LANES, w.writer % LANES, w.write_line);
    if (w.write_tick >= block.started && !ordered_before(self, w.writer, w.write_tick))
        race(self, "write-after-write", "writes", word, w.writer, "wrote", w.write_line, line);
    const u16 readers[2] = {w.reader, w.other_reader};
    for (const u32 reader : readers)
        if (!ordered_before(self, reader, w.read_tick))
            race(self, "write-after-read", "writes", word, reader, "read", w.read_line, line);
}

static inline u32 shared_offset(const Fiber& self, u32 address, u32 bytes, const char* doing, int line) {
    const u32 offset = address - SHARED_BASE, size = self.block->launch->shared_bytes;
    if (__builtin_expect(offset >= size || size - offset < bytes, 0))
        fault(
            self, line,
            "%s %u bytes at shared byte %d, out of bounds: the block has %u.\n  Look for an index past the tile, or a "
            "launch with too little shared memory.",
            doing, bytes, (int)offset, size);
    if (__builtin_expect(offset % bytes, 0))
        fault(self, line, "%s %u bytes at shared byte %u, which is misaligned: it must be a multiple of %u.", doing,
              bytes, offset, bytes);
    return offset;
}

// The memory to read `bytes` (4 or 16) from, checked and noted.
static inline const u8* shared_read(const Fiber& self, u32 address, u32 bytes, int line) {
    const Block& block = *self.block;
    const u32 offset = shared_offset(self, address, bytes, "reads", line);
    for (u32 word = offset / 4; word < (offset + bytes) / 4; word++) {
        Word& w = block.shadow[word];
        // One comparison for: written in this block, landed, and before the last __syncthreads.
        if (__builtin_expect(w.write_tick - block.started >= block.ordered - block.started, 0))
            check_read(self, word, line);
        add_reader(self, w, line);
    }
    return block.shared + offset;
}

// Notes a write of `bytes` that ends at `tick`, or an asynchronous copy that is IN_FLIGHT.
static inline void note_write(const Fiber& self, u32 offset, u32 bytes, u32 tick, int line) {
    for (u32 word = offset / 4; word < (offset + bytes) / 4; word++) {
        Word& w = self.block->shadow[word];
        const u32 ordered = self.block->ordered;
        if (__builtin_expect(w.write_tick >= ordered || w.read_tick >= ordered, 0)) check_write(self, word, line);
        w.write_tick = tick;
        w.read_tick = 0;
        w.writer = (u16)thread_of(self);
        w.write_line = (u16)line;
    }
}

// The memory to write `bytes` (4 or 16) to, checked and noted.
static inline u8* shared_write(const Fiber& self, u32 address, u32 bytes, int line) {
    const u32 offset = shared_offset(self, address, bytes, "writes", line);
    note_write(self, offset, bytes, self.block->tick, line);
    return self.block->shared + offset;
}

}  // namespace emu

static inline u32 shared_base() { return emu::SHARED_BASE; }

static inline void st_shared_b32(u32 addr, u32 v, int line = __builtin_LINE()) {
    memcpy(emu::shared_write(*emu::current, addr, 4, line), &v, 4);
}

static inline void st_shared_b128(u32 addr, const u32 (&v)[4], int line = __builtin_LINE()) {
    memcpy(emu::shared_write(*emu::current, addr, 16, line), v, 16);
}

static inline u32 ld_shared_b32(u32 addr, int line = __builtin_LINE()) {
    u32 v;
    memcpy(&v, emu::shared_read(*emu::current, addr, 4, line), 4);
    return v;
}

static inline float ld_shared_f32(u32 addr, int line = __builtin_LINE()) {
    return emu::from_bits(ld_shared_b32(addr, line));
}

static inline void ld_shared_b128(u32 (&v)[4], u32 addr, int line = __builtin_LINE()) {
    memcpy(v, emu::shared_read(*emu::current, addr, 16, line), 16);
}
