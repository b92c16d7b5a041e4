//! Large blocks of host memory, which a plugin frees and soon asks for again.
//!
//! glibc's malloc maps a block of 32 MiB and more (`DEFAULT_MMAP_THRESHOLD_MAX`) anew each time, and the system clears each of
//! its pages when it is touched first: 20,000 page faults for a program with 80 MiB of temporary memory, in each launch.
//! So what a plugin frees is kept for what it asks for next, as PyTorch's allocator for GPUs does.
//! The blocks are malloc's own: whoever else frees one does no harm.

use parking_lot::Mutex;

use crate::plugin::Plugin;

/// Smaller blocks malloc keeps by itself.
const LARGE: usize = 32 << 20;
/// A kept block is given back when so many large blocks were asked for since it was freed.
const AGE: u64 = 256;

impl Plugin {
    /// Keeps the large blocks of host memory that the plugin frees for what it asks for next. What is kept and what is in use
    /// are never more together than was in use at once; [`release_blocks`] gives back what is kept.
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

#[derive(Clone, Copy, PartialEq, Debug)]
struct Block {
    address: usize,
    bytes: usize,
    /// How many blocks had been asked for when it was freed.
    freed: u64,
}

/// What was given and what is kept. Whoever changes it gives back what comes out.
struct Blocks {
    used: Vec<Block>,
    /// What was freed last is last.
    kept: Vec<Block>,
    /// Bytes that were in use at once.
    most: usize,
    /// Blocks that were asked for.
    asked: u64,
}

impl Blocks {
    const fn new() -> Blocks {
        Blocks { used: Vec::new(), kept: Vec::new(), most: 0, asked: 0 }
    }

    /// The kept block that fits best, of at most an eighth more.
    fn take(&mut self, align: usize, bytes: usize) -> Option<Block> {
        self.asked += 1;
        let fits = |b: &&Block| {
            (bytes..=bytes.saturating_add(bytes / 8)).contains(&b.bytes) && b.address.is_multiple_of(align)
        };
        let best = *self.kept.iter().rev().filter(fits).min_by_key(|b| b.bytes)?;
        self.kept.retain(|b| *b != best);
        self.used.push(best);
        Some(best)
    }

    /// A new block is in use.
    fn given(&mut self, block: Block) -> Vec<Block> {
        // Somebody else has freed what was there.
        self.used.retain(|b| b.address != block.address);
        self.used.push(block);
        self.most = self.most.max(total(&self.used));
        self.surplus()
    }

    /// A block is free; nothing if it is none of ours.
    fn freed(&mut self, address: usize) -> Option<Vec<Block>> {
        let at = self.used.iter().position(|b| b.address == address)?;
        let block = self.used.swap_remove(at);
        self.kept.push(Block { freed: self.asked, ..block });
        Some(self.surplus())
    }

    /// What is kept too long, or beyond the most that was in use.
    fn surplus(&mut self) -> Vec<Block> {
        let mut beyond = (total(&self.used) + total(&self.kept)).saturating_sub(self.most);
        let asked = self.asked;
        let old = self.kept.extract_if(.., |b| {
            let goes = beyond > 0 || asked - b.freed > AGE;
            if goes {
                beyond = beyond.saturating_sub(b.bytes);
            }
            goes
        });
        old.collect()
    }
}

fn total(blocks: &[Block]) -> usize {
    blocks.iter().map(|b| b.bytes).sum()
}

#[cfg(all(target_os = "linux", target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod malloc {
    use std::ffi::{c_int, c_void};

    use super::{BLOCKS, Block, LARGE, release_blocks};
    use crate::imports;
    use crate::plugin::Plugin;

    pub(super) fn redirect(plugin: &Plugin) -> bool {
        let replace = |name, function| {
            // SAFETY: both have the types of the C library's functions, do what those do, and are never unloaded.
            unsafe { imports::replace(plugin.api().address(), name, function) }
        };
        // In this order: what is given has to come back.
        replace(c"free", free as *mut c_void) && replace(c"posix_memalign", posix_memalign as *mut c_void)
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
        if let Some(block) = BLOCKS.lock().take(align, bytes) {
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
        assert_eq!((total(&blocks.used), total(&blocks.kept), blocks.most), (60 * M, 0, 60 * M));
    }

    #[test]
    fn what_is_not_wanted_goes() {
        let mut blocks = Blocks::new();
        blocks.given(block(0x1000, 40 * M));
        blocks.given(block(0x2000, 90 * M));
        blocks.freed(0x2000);
        blocks.freed(0x1000);
        let mut old = Vec::new();
        for _ in 0..=AGE {
            let address = blocks.take(64, 40 * M).unwrap().address;
            old.extend(blocks.freed(address).unwrap());
        }
        assert_eq!(old.iter().map(|b| b.address).collect::<Vec<_>>(), [0x2000]);
    }

    #[test]
    fn what_somebody_else_freed_is_forgotten() {
        let mut blocks = Blocks::new();
        blocks.given(block(0x1000, 40 * M));
        blocks.given(block(0x1000, 50 * M));
        assert_eq!(total(&blocks.used), 50 * M);
    }
}
