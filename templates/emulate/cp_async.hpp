// Asynchronous copies from global to shared memory (PTX ISA, "cp.async", "cp.async.commit_group",
// "cp.async.wait_group"). A thread's copies since its last commit are one group; a wait returns when all but the newest
// N groups of the calling thread have landed, for that thread alone to see. Here a copy lands in that wait and reads
// its source only then, as late as the rules allow: until then the destination may be neither read nor written.

namespace emu {

// Of `bytes`: 4 or 16.
static void issue_copy(Fiber& self, u32 address, const void* source, u32 bytes, bool valid, int line) {
    const u32 offset = shared_offset(self, address, bytes, "copies", line);
    if (valid) check_global(self, source, bytes, false, line);
    note_write(self, offset, bytes, IN_FLIGHT, line);
    if (self.first_copy > self.copy_capacity / 2) {  // those that have landed make room
        self.n_copies -= self.first_copy;
        memmove(self.copies, self.copies + self.first_copy, self.n_copies * sizeof(Copy));
        self.first_copy = 0;
    }
    if (self.n_copies == self.copy_capacity) {
        const u32 capacity = self.copy_capacity ? 2 * self.copy_capacity : 64;
        void* copies = realloc(self.copies, capacity * sizeof(Copy));
        if (!copies) fault(self, line, "out of memory on the host");
        self.copies = (Copy*)copies;
        self.copy_capacity = capacity;
    }
    self.copies[self.n_copies++] = {valid ? source : nullptr, bytes, offset, self.group};
}

static void land_copies(Fiber& self, u32 newest) {
    Block& block = *self.block;
    while (self.first_copy < self.n_copies) {
        const Copy& copy = self.copies[self.first_copy];
        if (copy.group + newest >= self.group) return;
        if (copy.source)
            memcpy(block.shared + copy.offset, copy.source, copy.bytes);
        else
            memset(block.shared + copy.offset, 0, copy.bytes);
        for (u32 i = 0; i < copy.bytes / 4; i++) block.shadow[copy.offset / 4 + i].write_tick = block.tick;
        self.first_copy++;
    }
    self.first_copy = self.n_copies = 0;
}

}  // namespace emu

// 16 bytes. Without `valid`, 16 zero bytes are written and src is not read.
static inline void cp_async_16(u32 dst, const void* src, bool valid, int line = __builtin_LINE()) {
    emu::issue_copy(*emu::current, dst, src, 16, valid, line);
}

static inline void cp_async_commit() { emu::current->group++; }

template <int N>
static inline void cp_async_wait() {
    emu::land_copies(*emu::current, N);
}
