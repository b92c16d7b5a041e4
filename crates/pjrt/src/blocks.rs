//! Large blocks of host memory, which a plugin frees and soon asks for again.
//!
//! glibc's malloc gives large blocks back to the system when they are freed: always those of 32 MiB and more
//! (`DEFAULT_MMAP_THRESHOLD_MAX`), and smaller ones when too much is free at the end of a heap. The system clears each page
//! of a new one when it is touched first: 20,000 page faults for a program with 80 MiB of temporary memory, in each launch.
//! So what a plugin frees is kept for what it asks for next, as PyTorch's allocator for GPUs does.
//! The blocks are malloc's own: whoever else frees one does no harm.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::plugin::Plugin;

/// Smaller blocks malloc keeps by itself.
const LARGE: usize = 256 << 10;
/// A kept block is given back when so many times the most that was in use has been asked for since it was freed.
const AGE: u64 = 64;
/// So that a few small blocks more than ever before do not drive out a large one, what is kept and in use may be more than
/// was in use at once by a part of so many.
const SLACK: usize = 16;
/// A block of this size or more may be the temporary memory of a program.
const TEMPORARY: usize = 16 << 20;
/// Bytes of a new block for each microsecond that its asker waits for another one to be freed: a microsecond for 16 pages. On
/// a virtual machine the system took 25 to 31 to clear these.
const BYTES_PER_MICROSECOND: usize = 64 << 10;

impl Plugin {
    /// Keeps the large blocks of host memory that the plugin frees for what it asks for next. What is kept and what is in use
    /// are never more together than was in use at once and a sixteenth; [`release_blocks`] gives back what is kept.
    ///
    /// Returns whether it can: whether the plugin asks a C library for its memory that is glibc.
    pub fn keep_blocks(&self) -> bool {
        malloc::redirect(self)
    }
}

/// Gives what is kept back to the system, and says how many bytes that were.
pub fn release_blocks() -> usize {
    let kept = std::mem::take(&mut BLOCKS.lock().kept);
    malloc::give_back(&kept)
}

static BLOCKS: Mutex<Blocks> = Mutex::new(Blocks::new());
/// A block was freed.
static FREED: Condvar = Condvar::new();

/// A kept block, which is in use from now on.
///
/// A program's temporary memory is freed a little after its results are there, later still where the thread that waited for
/// these took the core. So the next program's waits for a moment: what is freed fits, or need not be there beside it.
fn take(align: usize, bytes: usize) -> Option<Block> {
    let mut blocks = BLOCKS.lock();
    blocks.asked += bytes as u64;
    let mut block = blocks.take(align, bytes);
    if block.is_none() && blocks.may_be_freed(bytes) {
        let (before, end) = (blocks.freed, Instant::now() + longest_wait(bytes));
        while block.is_none() && blocks.freed == before && !FREED.wait_until(&mut blocks, end).timed_out() {
            block = blocks.take(align, bytes);
        }
    }
    block
}

fn longest_wait(bytes: usize) -> Duration {
    Duration::from_micros((bytes / BYTES_PER_MICROSECOND) as u64)
}

#[derive(Clone, Copy, PartialEq, Debug)]
struct Block {
    address: usize,
    bytes: usize,
    /// How many bytes had been asked for when it was freed.
    freed: u64,
}

/// What was given and what is kept. Whoever changes it gives back what comes out.
struct Blocks {
    /// Bytes by address.
    used: BTreeMap<usize, usize>,
    in_use: usize,
    /// What was freed last is last.
    kept: Vec<Block>,
    /// Bytes that were in use at once.
    most: usize,
    /// Bytes that were asked for.
    asked: u64,
    /// How many blocks of the size of temporary memory were freed.
    freed: u64,
}

impl Blocks {
    const fn new() -> Blocks {
        Blocks { used: BTreeMap::new(), in_use: 0, kept: Vec::new(), most: 0, asked: 0, freed: 0 }
    }

    /// The kept block that fits best, of at most an eighth more.
    fn take(&mut self, align: usize, bytes: usize) -> Option<Block> {
        let fits = |b: &Block| {
            (bytes..=bytes.saturating_add(bytes / 8)).contains(&b.bytes) && b.address.is_multiple_of(align)
        };
        let fitting = self.kept.iter().enumerate().rev().filter(|(_, b)| fits(b));
        let (best, _) = fitting.min_by_key(|(_, b)| b.bytes)?;
        let best = self.kept.remove(best);
        self.give(best);
        Some(best)
    }

    /// Whether a block is in use that may be the temporary memory of a program as this one.
    fn may_be_freed(&self, bytes: usize) -> bool {
        bytes >= TEMPORARY && self.used.values().any(|own| *own >= bytes / 2)
    }

    fn give(&mut self, block: Block) {
        // Somebody else has freed what was there.
        let before = self.used.insert(block.address, block.bytes).unwrap_or(0);
        self.in_use = self.in_use - before + block.bytes;
    }

    /// A new block is in use.
    fn given(&mut self, block: Block) -> Vec<Block> {
        self.give(block);
        self.most = self.most.max(self.in_use);
        self.surplus()
    }

    /// A block is free; nothing if it is none of ours.
    fn freed(&mut self, address: usize) -> Option<Vec<Block>> {
        let bytes = self.used.remove(&address)?;
        self.in_use -= bytes;
        self.freed += u64::from(bytes >= TEMPORARY);
        self.kept.push(Block { address, bytes, freed: self.asked });
        Some(self.surplus())
    }

    /// What is kept too long, and what is beyond the most that was in use, of which the system would have to clear least
    /// again.
    fn surplus(&mut self) -> Vec<Block> {
        let oldest = self.asked.saturating_sub(AGE * self.most as u64);
        let old = self.kept.iter().take_while(|b| b.freed < oldest).count();
        let mut out: Vec<Block> = self.kept.drain(..old).collect();
        let kept: usize = self.kept.iter().map(|b| b.bytes).sum();
        let mut beyond = (self.in_use + kept).saturating_sub(self.most + self.most / SLACK);
        while beyond > 0 {
            let smallest = self.kept.iter().enumerate().min_by_key(|(_, b)| b.bytes);
            let Some((at, _)) = smallest else { break };
            let block = self.kept.remove(at);
            beyond = beyond.saturating_sub(block.bytes);
            out.push(block);
        }
        out
    }
}

#[cfg(all(target_os = "linux", target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod malloc {
    use std::ffi::{c_int, c_void};

    use super::{BLOCKS, Block, FREED, LARGE, release_blocks, take};
    use crate::imports;
    use crate::plugin::Plugin;

    pub(super) fn redirect(plugin: &Plugin) -> bool {
        let replace = |name, function| {
            // SAFETY: both have the types of the C library's functions, do what those do, and are never unloaded.
            unsafe { imports::replace(plugin.api().address(), name, function) }
        };
        // In this order: what is given has to come back.
        let kept = replace(c"free", free as *mut c_void)
            && replace(c"posix_memalign", posix_memalign as *mut c_void);
        if kept {
            keep_others();
        }
        kept
    }

    /// malloc maps blocks anew from a size on that grows with the blocks that it sees freed, of which it sees few now: one
    /// of the largest that counts, so that what PyTorch's kernels free is kept as ever.
    fn keep_others() {
        const LARGEST: usize = 32 << 20;
        // SAFETY: a block that nobody uses; null if there is no memory, which `free` takes.
        unsafe { libc::free(std::hint::black_box(libc::malloc(LARGEST - (64 << 10)))) };
    }

    pub(super) fn give_back(blocks: &[Block]) -> usize {
        for block in blocks {
            // SAFETY: a block that malloc gave and that nobody uses any more.
            unsafe { libc::free(block.address as *mut c_void) };
        }
        blocks.iter().map(|b| b.bytes).sum()
    }

    /// As `posix_memalign(3)`.
    unsafe extern "C" fn posix_memalign(out: *mut *mut c_void, align: usize, bytes: usize) -> c_int {
        if bytes < LARGE {
            // SAFETY: the caller's arguments.
            return unsafe { libc::posix_memalign(out, align, bytes) };
        }
        if let Some(block) = take(align, bytes) {
            // SAFETY: the caller gives a place for the address.
            unsafe { *out = block.address as *mut c_void };
            return 0;
        }
        // SAFETY: the caller's arguments.
        let allocate = || unsafe { libc::posix_memalign(out, align, bytes) };
        let mut code = allocate();
        if code == libc::ENOMEM && release_blocks() > 0 {
            code = allocate();
        }
        if code == 0 {
            // SAFETY: malloc has put the address of a block there.
            let (address, bytes) = unsafe { (*out as usize, libc::malloc_usable_size(*out)) };
            let old = BLOCKS.lock().given(Block { address, bytes, freed: 0 });
            give_back(&old);
        }
        code
    }

    /// As `free(3)`.
    unsafe extern "C" fn free(address: *mut c_void) {
        // SAFETY: null, or a block of malloc's, whose size is before it.
        let bytes = unsafe { libc::malloc_usable_size(address) };
        if bytes < LARGE {
            // SAFETY: the caller's argument.
            return unsafe { libc::free(address) };
        }
        let old = BLOCKS.lock().freed(address as usize);
        FREED.notify_all();
        match old {
            Some(old) => _ = give_back(&old),
            // SAFETY: the caller's argument.
            None => unsafe { libc::free(address) },
        }
    }
}

/// Other C libraries give and take as they do.
#[cfg(not(all(
    target_os = "linux",
    target_env = "gnu",
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
mod malloc {
    pub(super) fn redirect(_: &crate::plugin::Plugin) -> bool {
        false
    }

    pub(super) fn give_back(_: &[super::Block]) -> usize {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const M: usize = 1 << 20;

    fn block(address: usize, bytes: usize) -> Block {
        Block { address, bytes, freed: 0 }
    }

    #[test]
    fn what_is_freed_is_taken_again() {
        let mut blocks = Blocks::new();
        assert_eq!(blocks.take(64, 40 * M), None);
        blocks.given(block(0x1000, 40 * M));
        blocks.given(block(0x2000, 42 * M));
        assert_eq!(blocks.freed(0x1000), Some(vec![]));
        assert_eq!(blocks.freed(0x2000), Some(vec![]));
        assert_eq!(blocks.freed(0x2000), None, "free already");
        assert_eq!(blocks.freed(0x9000), None, "somebody else's");
        assert_eq!(blocks.take(64, 30 * M), None, "too large");
        assert_eq!(blocks.take(64, 43 * M), None, "too small");
        assert_eq!(blocks.take(1 << 20, 40 * M), None, "other alignment");
        assert_eq!(blocks.take(64, 39 * M).map(|b| b.address), Some(0x1000), "the best");
        assert_eq!(blocks.take(64, 39 * M).map(|b| b.address), Some(0x2000));
        assert_eq!(blocks.take(64, 39 * M), None);
    }

    #[test]
    fn there_are_never_more_than_were_in_use_at_once() {
        let mut blocks = Blocks::new();
        blocks.given(block(0x1000, 40 * M));
        blocks.freed(0x1000);
        // Another size does not fit: the one that is kept has to go.
        assert_eq!(blocks.take(64, 60 * M), None);
        let old = blocks.given(block(0x2000, 60 * M));
        assert_eq!(old.iter().map(|b| b.address).collect::<Vec<_>>(), [0x1000]);
        assert_eq!((blocks.in_use, blocks.kept.len(), blocks.most), (60 * M, 0, 60 * M));
    }

    #[test]
    fn small_blocks_go_before_large_ones() {
        let mut blocks = Blocks::new();
        let addresses = |old: Vec<Block>| old.iter().map(|b| b.address).collect::<Vec<_>>();
        blocks.given(block(0x1000, 160 * M));
        blocks.given(block(0x2000, 2 * M));
        blocks.given(block(0x3000, M));
        for address in [0x1000, 0x2000, 0x3000] {
            blocks.freed(address);
        }
        assert_eq!(addresses(blocks.given(block(0x4000, 4 * M))), [], "a sixteenth more is left");
        assert_eq!(addresses(blocks.given(block(0x5000, 7 * M))), [0x3000], "the smallest");
        assert_eq!(addresses(blocks.given(block(0x6000, 150 * M))), [0x2000, 0x1000]);
    }

    #[test]
    fn what_is_not_wanted_goes() {
        let mut blocks = Blocks::new();
        blocks.given(block(0x1000, 40 * M));
        blocks.given(block(0x2000, 90 * M));
        blocks.freed(0x2000);
        blocks.freed(0x1000);
        let mut old = Vec::new();
        let asked = AGE as usize * 130 * M;
        for _ in 0..=asked / (40 * M) {
            blocks.asked += (40 * M) as u64;
            let address = blocks.take(64, 40 * M).unwrap().address;
            old.extend(blocks.freed(address).unwrap());
        }
        assert_eq!(old.iter().map(|b| b.address).collect::<Vec<_>>(), [0x2000]);
    }

    #[test]
    fn temporary_memory_waits_for_what_is_freed() {
        // Of sizes that no other test has.
        let (address, other, bytes) = (1 << 40, 1 << 41, 123 * M);
        let waits = |bytes| {
            let began = Instant::now();
            assert_eq!(take(64, bytes), None);
            began.elapsed() >= longest_wait(bytes)
        };
        BLOCKS.lock().given(block(address, bytes));
        assert!(waits(bytes) && waits(200 * M), "it stays in use");
        assert!(!waits(300 * M), "it is too small to matter");
        let asker = std::thread::spawn(move || (0..1000).find_map(|_| take(64, bytes)));
        assert!(BLOCKS.lock().freed(address).is_some());
        FREED.notify_all();
        assert_eq!(asker.join().unwrap().map(|found| found.address), Some(address));
        // One that does not fit ends the wait, too.
        BLOCKS.lock().given(block(other, 77 * M));
        let before = BLOCKS.lock().freed;
        BLOCKS.lock().freed(other);
        assert_eq!(BLOCKS.lock().freed, before + 1);
        BLOCKS.lock().used.remove(&address);
    }

    #[test]
    fn what_somebody_else_freed_is_forgotten() {
        let mut blocks = Blocks::new();
        blocks.given(block(0x1000, 40 * M));
        blocks.given(block(0x1000, 50 * M));
        assert_eq!(blocks.in_use, 50 * M);
    }
}
