// Shared memory by 32-bit addresses, with the checks of its shadow. A read must be of words that are written, have
// landed and are ordered before it; a write must be ordered after all other accesses. What orders two threads is a
// barrier of both, __syncthreads or, in one warp, __syncwarp: ldmatrix, mma and shuffles order nothing (PTX ISA,
// "Memory Consistency Model": only barriers and fences do). In a pipelined block it is also a named barrier, or an
// arrival at an mbarrier and the wait for it. What tensor cores and the copy engine read is checked when they are told
// to, and must stay as it is until a wait says that they have; what threads wrote needs their fence_proxy_async first.

namespace emu {

// Whether clocks say that thread `other` made an access at `tick` before.
static inline bool clocks_order(const Block& block, const u32* clocks, u32 other, u32 tick) {
    const u32 warp = other / LANES;
    return tick < clocks[warp] ||
           (tick < clocks[elected_clock(block, warp)] && other % LANES == block.warps[warp].elected);
}

// Whether an access that thread `other` made at `tick` is ordered before one that `self` makes now.
static inline bool ordered_before(const Fiber& self, u32 other, u32 tick) {
    return tick < self.block->ordered || other == thread_of(self) ||
           (other / LANES == self.warp->index && tick < self.warp->ordered) ||
           (self.block->pipelined && clocks_order(*self.block, self.clocks, other, tick));
}

static const char* missing_barrier(const Fiber& self, u32 other) {
    if (other / LANES == self.warp->index) return "__syncwarp() or __syncthreads()";
    return self.block->pipelined ? "__syncthreads(), named barrier, or arrival at an mbarrier and wait for it"
                                 : "__syncthreads()";
}

__attribute__((noreturn, noinline, cold)) static void race(const Fiber& self, const char* kind, const char* doing,
                                                           u32 word, u32 other, const char* did, u32 other_line,
                                                           int line) {
    fault(self, line,
          "%s race: %s shared byte %u, which warp %u, lane %u %s at line %u, with no barrier in between.\n  Look for a "
          "missing %s.",
          kind, doing, word * 4, other / LANES, other % LANES, did, other_line, missing_barrier(self, other));
}

// Words whose last write is a mark, and not a tick of a thread: faults unless `clocks` say that it has landed.
__attribute__((noinline)) static void check_engine_write(const Fiber& self, const u32* clocks, u32 word,
                                                         const char* doing, int line) {
    const Block& block = *self.block;
    const Word& w = block.shadow[word];
    if (w.write_tick == MBARRIER)
        fault(self, line, "%s shared byte %u, which is part of the mbarrier that line %u initialised.", doing, word * 4,
              w.write_line);
    if (w.write_tick == LOADING)
        fault(self, line,
              "%s shared byte %u, to which warp %u, lane %u issued a tensor copy at line %u that has not landed.\n  "
              "Look for a missing mbarrier_wait, a wrong parity, bytes that no mbarrier_arrive_expect_tx announced, or "
              "a stage that is filled again too early.",
              doing, word * 4, w.writer / LANES, w.writer % LANES, w.write_line);
    const u32 tick = w.write_tick - BY_ENGINE;
    if (tick >= block.started && tick >= clocks[mbarrier_clock(block, w.writer)])
        fault(self, line,
              "race: %s shared byte %u, to which the tensor copy of line %u wrote, without having waited for it: it "
              "counts on the mbarrier at shared byte %u.\n  Look for a missing mbarrier_wait, or one for another "
              "barrier or phase.",
              doing, word * 4, w.write_line, block.mbarriers[w.writer].offset);
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
    const bool engine = w.write_tick >= BY_ENGINE;
    if (engine && (w.write_tick >= MBARRIER || w.write_tick - BY_ENGINE >= block.started))
        return check_engine_write(self, self.clocks, word, "reads", line);
    if (engine || w.write_tick < block.started)
        fault(
            self, line,
            "reads shared byte %u (of %u), which no thread has written.\n  Look for a tile that is not loaded, or not "
            "loaded whole.",
            word * 4, block.launch->shared_bytes);
    if (!ordered_before(self, w.writer, w.write_tick))
        race(self, "read-after-write", "reads", word, w.writer, "wrote", w.write_line, line);
}

static u32 new_readers(Block& block) {
    constexpr u32 MOST = 1u << 16;
    if (!block.readers) block.readers = (Reader*)own(block, MOST * block.n_warps * sizeof(Reader));
    u32 index = block.free_readers;
    if (index)
        block.free_readers = block.readers[index * block.n_warps].tick;
    else if (block.n_readers + 1 < MOST)
        index = ++block.n_readers;
    else
        return 0;
    memset(&block.readers[index * block.n_warps], 0, block.n_warps * sizeof(Reader));
    return index;
}

// The reads of one warp, with one more by a lane of it: what is ordered before `self` need not be kept.
static void add_to(Reader& reader, const Fiber& self, u32 lane, u32 tick, int line) {
    const u32 first = self.warp->index * LANES;
    if (!reader.tick || reader.lane == lane || ordered_before(self, first + reader.lane, reader.tick)) {
        reader.tick = tick;
        reader.lane = (u16)lane;
    } else {
        reader.other_tick = tick;
        reader.other_lane = (u16)lane;
    }
    reader.line = (u16)line;
}

// In a pipelined block: the last read replaces those that are ordered before it; others are kept beside it.
__attribute__((noinline)) static void add_reader_pipelined(const Fiber& self, Word& w, int line) {
    Block& block = *self.block;
    const u32 warp = self.warp->index;
    if (w.read_tick == MANY)
        return add_to(block.readers[w.readers * block.n_warps + warp], self, self.lane, block.tick, line);
    if (w.read_tick >= block.started &&
        !(ordered_before(self, w.reader, w.read_tick) && ordered_before(self, w.other_reader, w.read_tick))) {
        const u32 index = new_readers(block);
        if (!index) return;  // too many to remember: it may miss a race
        Reader* readers = &block.readers[index * block.n_warps];
        const u32 others[2] = {w.reader, w.other_reader};
        for (const u32 reader : others) {
            const Fiber& other = block.fibers[reader];
            add_to(readers[reader / LANES], other, other.lane, w.read_tick, w.read_line);
        }
        add_to(readers[warp], self, self.lane, block.tick, line);
        w.readers = (u16)index;
        w.read_tick = MANY;
        return;
    }
    w.reader = w.other_reader = (u16)thread_of(self);
    w.read_tick = block.tick;
    w.read_line = (u16)line;
}

// Adds a reader to those since the last __syncthreads.
static inline void add_reader(const Fiber& self, Word& w, int line) {
    const u32 thread = thread_of(self), warp = self.warp->index;
    const bool one_warp = w.reader / LANES == w.other_reader / LANES;
    const bool mine = one_warp && w.reader / LANES == warp;
    if (w.read_tick < self.block->outdated || (mine && w.read_tick < self.warp->ordered)) {
        w.reader = w.other_reader = (u16)thread;
        w.read_tick = self.block->tick;
        w.read_line = (u16)line;
    } else if (self.block->pipelined) {
        add_reader_pipelined(self, w, line);
    } else if (mine ? w.reader == w.other_reader : one_warp) {
        w.other_reader = (u16)thread;
    }
}

// A write must come after what the tensor cores and the copy engine read here, which a wait of the issuer tells.
__attribute__((noinline)) static void check_unit_readers(const Fiber& self, u32 offset, int line) {
    const Block& block = *self.block;
    const UnitReader* readers = &block.unit_readers[offset / 16 * (block.n_groups + 1)];
    for (u32 unit = 0; unit <= block.n_groups; unit++) {
        const UnitReader& reader = readers[unit];
        if (reader.tick < block.started) continue;
        const bool product = unit < block.n_groups;
        const u32 clock = product ? group_clock(block, unit) : store_clock(block, reader.thread / LANES);
        if (reader.tick < self.clocks[clock]) continue;
        if (product)
            fault(self, line,
                  "write-after-read race: writes shared byte %u, which a product of warpgroup %u reads that was issued "
                  "at line %u, with no wgmma_wait and barrier in between.\n  Look for a missing wgmma_wait, one that "
                  "waits for too few groups, or a stage that is handed back or filled again too early.",
                  offset, unit, reader.line);
        fault(self, line,
              "write-after-read race: writes shared byte %u, which a tensor copy to global memory reads that warp %u, "
              "lane %u issued at line %u, with no tma_store_wait_read and barrier in between.\n  Look for a missing "
              "tma_store_wait_read in the issuing thread, or a barrier after it.",
              offset, reader.thread / LANES, reader.thread % LANES, reader.line);
    }
}

static void check_many_readers(const Fiber& self, u32 word, int line) {
    Block& block = *self.block;
    const Word& w = block.shadow[word];
    Reader* readers = &block.readers[w.readers * block.n_warps];
    for (u32 warp = 0; warp < block.n_warps; warp++) {
        const Reader& reader = readers[warp];
        const u32 lanes[2] = {reader.lane, reader.other_lane}, ticks[2] = {reader.tick, reader.other_tick};
        for (u32 i = 0; i < 2; i++)
            if (ticks[i] && !ordered_before(self, warp * LANES + lanes[i], ticks[i]))
                race(self, "write-after-read", "writes", word, warp * LANES + lanes[i], "read", reader.line, line);
    }
    readers->tick = block.free_readers;  // the write follows, and the readers are forgotten
    block.free_readers = w.readers;
}

// A write of `bytes`, of which this is one word.
static void check_write(const Fiber& self, u32 word, u32 bytes, int line) {
    const Block& block = *self.block;
    if (block.unit_reads && (bytes < 16 || word % 4 == 0)) check_unit_readers(self, word * 4, line);
    const Word& w = block.shadow[word];
    if (w.write_tick == IN_FLIGHT)
        fault(self, line,
              "writes shared byte %u, to which warp %u, lane %u issued an asynchronous copy at line %u that has not "
              "landed.\n  Look for a missing cp_async_wait, or a stage that is filled again too early.",
              word * 4, w.writer / LANES, w.writer % LANES, w.write_line);
    if (w.write_tick >= BY_ENGINE)
        check_engine_write(self, self.clocks, word, "writes", line);
    else if (w.write_tick >= block.started && !ordered_before(self, w.writer, w.write_tick))
        race(self, "write-after-write", "writes", word, w.writer, "wrote", w.write_line, line);
    if (w.read_tick == MANY) return check_many_readers(self, word, line);
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

// Notes a write of `bytes` that ends at `tick`, or an asynchronous copy that is IN_FLIGHT or LOADING.
static inline void note_write(const Fiber& self, u32 offset, u32 bytes, u32 tick, int line) {
    for (u32 word = offset / 4; word < (offset + bytes) / 4; word++) {
        Word& w = self.block->shadow[word];
        const u32 outdated = self.block->outdated;
        if (__builtin_expect(w.write_tick >= outdated || w.read_tick >= outdated, 0))
            check_write(self, word, bytes, line);
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

// The words that an asynchronous unit is about to read, 16 bytes at `offset`, on behalf of a thread or of a warpgroup
// whose every thread knows `clocks`. They must be written, have landed, be ordered before the issue and, where a thread
// wrote them, be followed by its fence_proxy_async, itself ordered before. `seen` is the last record that passed.
struct Seen {
    u32 tick, writer;
};

// Whether a thread called fence_proxy_async after `tick`, as far as `ordered` says that it comes before.
template <class Ordered>
static bool fenced(const Fiber& thread, u32 tick, Ordered ordered) {
    const u32 kept = thread.n_fences < FENCES ? thread.n_fences : FENCES;
    for (u32 i = thread.n_fences - kept; i < thread.n_fences; i++) {
        const u32 fence = thread.fences[i % FENCES];
        if (fence < tick) continue;
        if (i > 0 && i == thread.n_fences - kept) return true;  // older ones are forgotten; one may have been in time
        return ordered(fence);
    }
    return false;
}

// A word over which the copy engine is about to write. What threads read there must be ordered before, each by a
// fence_proxy_async of its own: an mbarrier_arrive alone may pass a load that is still in flight.
static void check_read_before_load(const Fiber& self, u32 word, int line) {
    const Block& block = *self.block;
    const Word& w = block.shadow[word];
    auto check = [&](u32 thread, u32 tick, int read_line) {
        auto ordered = [&](u32 at) { return ordered_before(self, thread, at); };
        if (tick < block.started || !ordered(tick)) return;  // no read, or a race, which the write finds
        if (fenced(block.fibers[thread], tick, ordered)) return;
        fault(self, line,
              "writes shared byte %u asynchronously, which warp %u, lane %u read at line %u, with no fence_proxy_async "
              "by that thread before the barrier.\n  Look for a missing fence_proxy_async() between the reads and the "
              "barrier.",
              word * 4, thread / LANES, thread % LANES, read_line);
    };
    if (w.read_tick != MANY) {
        check(w.reader, w.read_tick, w.read_line);
        return check(w.other_reader, w.read_tick, w.read_line);
    }
    for (u32 warp = 0; warp < block.n_warps; warp++) {
        const Reader& reader = block.readers[w.readers * block.n_warps + warp];
        check(warp * LANES + reader.lane, reader.tick, reader.line);
        check(warp * LANES + reader.other_lane, reader.other_tick, reader.line);
    }
}

__attribute__((noinline)) static void check_unit_word(const Fiber& self, const u32* clocks, bool alone, u32 word,
                                                      int line) {
    const Block& block = *self.block;
    const Word& w = block.shadow[word];
    if (w.write_tick == IN_FLIGHT) check_read(self, word, line);  // faults
    if (w.write_tick >= MBARRIER || (w.write_tick >= BY_ENGINE && w.write_tick - BY_ENGINE >= block.started))
        return check_engine_write(self, clocks, word, "reads", line);
    if (w.write_tick >= BY_ENGINE || w.write_tick < block.started) check_read(self, word, line);  // faults
    auto ordered = [&](u32 tick) {
        return tick < block.ordered || clocks_order(block, clocks, w.writer, tick) ||
               (alone && ordered_before(self, w.writer, tick));
    };
    if (!ordered(w.write_tick)) race(self, "read-after-write", "reads", word, w.writer, "wrote", w.write_line, line);
    if (fenced(block.fibers[w.writer], w.write_tick, ordered)) return;
    fault(self, line,
          "reads shared byte %u asynchronously, which warp %u, lane %u wrote at line %u, with no fence_proxy_async by "
          "that thread before the barrier.\n  Look for a missing fence_proxy_async() between the writes and the "
          "barrier.",
          word * 4, w.writer / LANES, w.writer % LANES, w.write_line);
}

static inline void unit_read(const Fiber& self, const u32* clocks, bool alone, u32 offset, u32 unit, Seen& seen,
                             int line) {
    const Block& block = *self.block;
    const Word* words = &block.shadow[offset / 4];
    for (u32 i = 0; i < 4; i++) {
        if (words[i].write_tick == seen.tick && words[i].writer == seen.writer) continue;
        check_unit_word(self, clocks, alone, offset / 4 + i, line);
        seen = {words[i].write_tick, words[i].writer};
    }
    block.unit_readers[offset / 16 * (block.n_groups + 1) + unit] = {block.tick, (u16)line, (u16)thread_of(self)};
}

static void need_unit_reads(Block& block) {
    need_pipelined(block);
    if (!block.unit_readers) block.unit_readers = (UnitReader*)own(block, unit_readers_bytes(block));
    block.unit_reads = true;
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

static inline void ld_shared_f32x2(float (&v)[2], u32 addr, int line = __builtin_LINE()) {
    memcpy(v, emu::shared_read(*emu::current, addr, 8, line), 8);
}

static inline void ld_shared_f32x4(float (&v)[4], u32 addr, int line = __builtin_LINE()) {
    memcpy(v, emu::shared_read(*emu::current, addr, 16, line), 16);
}

static inline void ld_shared_b128(u32 (&v)[4], u32 addr, int line = __builtin_LINE()) {
    memcpy(v, emu::shared_read(*emu::current, addr, 16, line), 16);
}

static inline u32 ld_shared_b32_by_first_lane(u32 addr, int line = __builtin_LINE()) {
    const u32 word = emu::current->lane == 0 ? ld_shared_b32(addr, line) : 0;
    return __shfl_sync(0xffffffffu, word, 0, line);
}
