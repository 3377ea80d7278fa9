// Barriers in shared memory that count arrivals and the bytes of bulk copies (PTX ISA, "mbarrier"). A phase completes
// when neither arrivals nor bytes are missing; the barrier then expects its arrivals again. Waits are by parity
// ("mbarrier.try_wait.parity"): for P they return while the current phase has the other parity, so a thread that comes
// two phases late waits once more. What arrivers did before they arrived is ordered before what the waiters do next.

namespace emu {

// The tx-count and the arrival counts of an mbarrier have 20 bits.
constexpr u32 MOST_ARRIVALS = (1u << 20) - 1;

static Mbarrier& find_mbarrier(const Fiber& self, u32 address, const char* doing, int line) {
    Block& block = *self.block;
    const u32 offset = shared_offset(self, address, 8, "uses an mbarrier of", line);
    const Word& w = block.shadow[offset / 4];
    if (w.write_tick != MBARRIER || block.mbarriers[w.writer].offset != offset)
        fault(self, line,
              "%s the mbarrier at shared byte %u, which is not initialised.\n  Look for a missing mbarrier_init, or a "
              "wrong address.",
              doing, offset);
    Mbarrier& barrier = block.mbarriers[w.writer];
    if (!ordered_before(self, barrier.init_thread, barrier.init_tick))
        fault(self, line,
              "%s the mbarrier at shared byte %u, which warp %u, lane %u initialised at line %d, with no barrier in "
              "between.\n  Look for a missing __syncthreads().",
              doing, offset, barrier.init_thread / LANES, barrier.init_thread % LANES, barrier.init_line);
    return barrier;
}

static inline u32 index_of(const Block& block, const Mbarrier& barrier) { return (u32)(&barrier - block.mbarriers); }

static void init_mbarrier(Fiber& self, u32 address, u32 arrivals, int line) {
    Block& block = *self.block;
    need_pipelined(block);
    const u32 offset = shared_offset(self, address, 8, "initialises an mbarrier of", line);
    if (arrivals == 0 || arrivals > MOST_ARRIVALS)
        fault(self, line, "initialises an mbarrier for %u arrivals; it must be from 1 to %u.", arrivals, MOST_ARRIVALS);
    if (block.n_mbarriers == MAX_MBARRIERS)
        fault(self, line, "initialises more than %u mbarriers, which is all that the emulator has.", MAX_MBARRIERS);
    const u32 index = block.n_mbarriers;
    note_write(self, offset, 8, MBARRIER, line);
    for (u32 word = offset / 4; word < offset / 4 + 2; word++) block.shadow[word].writer = (u16)index;
    block.n_mbarriers++;
    block.n_clocks = mbarrier_clock(block, block.n_mbarriers);
    Mbarrier& barrier = block.mbarriers[index];
    u32 *arriving = barrier.sync.arriving, *completed = barrier.sync.completed;
    memset(&barrier, 0, sizeof barrier);
    barrier.sync.arriving = arriving;
    barrier.sync.completed = completed;
    barrier.offset = offset;
    barrier.expected = barrier.pending = arrivals;
    barrier.init_thread = thread_of(self);
    barrier.init_tick = block.tick;
    barrier.init_line = line;
}

static void complete_phase(Block& block, Mbarrier& barrier) {
    if (barrier.pending || barrier.bytes) return;
    const u32 index = index_of(block, barrier);
    raise_to(barrier.sync.arriving[mbarrier_clock(block, index)], ++block.tick);
    complete(block, barrier.sync);
    barrier.phase++;
    if (barrier.phase_bytes) barrier.landed = barrier.phase;
    barrier.phase_bytes = 0;
    barrier.pending = barrier.expected;
    wake(block, WAIT_MBARRIER, index);
}

static void arrive(Fiber& self, u32 address, u32 bytes, int line) {
    Block& block = *self.block;
    Mbarrier& barrier = find_mbarrier(self, address, "arrives at", line);
    if (!barrier.pending)
        fault(self, line,
              "arrives at the mbarrier at shared byte %u, whose phase %u has all its %u arrivals and waits for %d "
              "bytes.\n  Look for a wrong number of arrivals in mbarrier_init, or an arrival before the wait for the "
              "phase before.",
              barrier.offset, barrier.phase, barrier.expected, barrier.bytes);
    const u32 before = unordered_arrival(self, barrier.sync);
    if (before != block.n_warps)
        fault(
            self, line,
            "race: arrives at the mbarrier at shared byte %u in phase %u, not knowing of the arrival of warp %u in the "
            "phase before: in another order it would count for that one.\n  Look for a missing mbarrier_wait, or a "
            "barrier used for two purposes.",
            barrier.offset, barrier.phase, before);
    barrier.bytes += (int)bytes;
    if (bytes > MOST_ARRIVALS || barrier.bytes > (int)MOST_ARRIVALS)
        fault(self, line, "announces %u bytes to the mbarrier at shared byte %u, which can wait for %u at a time.",
              bytes, barrier.offset, MOST_ARRIVALS);
    release(self, barrier.sync);
    barrier.pending--;
    complete_phase(block, barrier);
}

// `bytes` of a copy have landed.
static void complete_bytes(Block& block, Mbarrier& barrier, u32 bytes) {
    barrier.bytes -= (int)bytes;
    barrier.phase_bytes += bytes;
    complete_phase(block, barrier);
}

static void wait_for_phase(Fiber& self, u32 address, u32 parity, int line) {
    Block& block = *self.block;
    Mbarrier& barrier = find_mbarrier(self, address, "waits for", line);
    if (parity > 1)
        fault(self, line, "waits for parity %u of the mbarrier at shared byte %u; it must be 0 or 1.", parity,
              barrier.offset);
    while ((barrier.phase & 1) == parity) {
        self.wait = {"mbarrier_wait", line, 0};
        self.awaited = {WAIT_MBARRIER, index_of(block, barrier), parity};
        suspend(self);
    }
    raise_to(barrier.awaited, barrier.phase);
    acquire(self, barrier.sync);
}

}  // namespace emu

static inline void mbarrier_init(u32 barrier, u32 arrivals, int line = __builtin_LINE()) {
    emu::init_mbarrier(*emu::current, barrier, arrivals, line);
}

static inline void mbarrier_init_fence() {
    emu::Block& block = *emu::current->block;
    for (u32 i = 0; i < block.n_mbarriers; i++)
        if (block.mbarriers[i].init_thread == emu::thread_of(*emu::current)) block.mbarriers[i].fenced = true;
}

static inline void mbarrier_arrive(u32 barrier, int line = __builtin_LINE()) {
    emu::arrive(*emu::current, barrier, 0, line);
}

static inline void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes, int line = __builtin_LINE()) {
    emu::arrive(*emu::current, barrier, bytes, line);
}

static inline void mbarrier_wait(u32 barrier, u32 parity, int line = __builtin_LINE()) {
    emu::wait_for_phase(*emu::current, barrier, parity, line);
}
