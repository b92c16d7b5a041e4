//! Which accelerator PyTorch takes itself to have where it has CUDA too.
//!
//! PyTorch has one accelerator in a process, and a device from outside is it as soon as it is registered. Its backward
//! takes streams of the accelerator alone, and so that of CUDA tensors ends with an internal assertion
//! (pytorch/pytorch#161129); `torch.accelerator` and pinned memory are the device's, too. A package that is installed must
//! not do that to scripts that train on CUDA. What PyTorch asks is `c10::is_privateuse1_backend_registered()`, through a
//! slot of libtorch_cpu that the dynamic linker fills; here that slot is given another function.
//!
//! With it the accelerator is CUDA until the device is started, and for backwards of CUDA tensors afterwards.

use crate::state;
use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering::SeqCst};

const LIBRARY: &[u8] = b"/libtorch_cpu.so";
const ASKED: &CStr = c"_ZN3c1033is_privateuse1_backend_registeredEv";

/// Backwards of CUDA tensors that run.
static ELSEWHERE: AtomicU64 = AtomicU64::new(0);

extern "C" fn is_accelerator() -> bool {
    state::started().is_some() && ELSEWHERE.load(SeqCst) == 0
}

/// A backward of CUDA tensors begins, or ends.
pub(crate) fn backward_elsewhere(begins: bool) {
    match begins {
        true => ELSEWHERE.fetch_add(1, SeqCst),
        false => ELSEWHERE.fetch_sub(1, SeqCst),
    };
}

/// Lets PyTorch ask here. False if it does not ask through the dynamic linker.
pub(crate) fn share() -> bool {
    let mut found = false;
    // SAFETY: `each` is called with this pointer, during this call.
    unsafe { libc::dl_iterate_phdr(Some(each), (&raw mut found).cast()) };
    found
}

/// Replaces the slot if this library is the one that asks.
unsafe extern "C" fn each(info: *mut libc::dl_phdr_info, _: usize, found: *mut c_void) -> c_int {
    // SAFETY: the loader gives a description of a library that is loaded, and `share` its own flag.
    let (info, found) = unsafe { (&*info, &mut *found.cast::<bool>()) };
    if info.dlpi_name.is_null() {
        return 0;
    }
    // SAFETY: the loader's names are C strings.
    if !unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes().ends_with(LIBRARY) {
        return 0;
    }
    // SAFETY: as above; PyTorch's libraries are never unloaded.
    *found = unsafe { Loaded::of(info) }.is_some_and(|library| unsafe { library.replace() });
    1
}

/// What of the dynamic section of a library is needed to find a slot.
struct Loaded {
    base: usize,
    symbols: *const libc::Elf64_Sym,
    names: usize,
    /// Relocations of calls, and how many.
    calls: (*const libc::Elf64_Rela, usize),
    /// What the loader has made read-only after it had filled it.
    fixed: std::ops::Range<usize>,
}

#[repr(C)]
struct Dynamic {
    tag: i64,
    value: usize,
}

// Tags of the dynamic section, from the ELF specification.
const STRTAB: i64 = 5;
const SYMTAB: i64 = 6;
const PLTRELSZ: i64 = 2;
const JMPREL: i64 = 23;

impl Loaded {
    /// # Safety
    /// The library stays loaded.
    unsafe fn of(info: &libc::dl_phdr_info) -> Option<Loaded> {
        let base = info.dlpi_addr as usize;
        // SAFETY: the loader says where the headers are and how many.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
        let of_type = |kind| headers.iter().find(|h| h.p_type == kind);
        let mut entry = (base + of_type(libc::PT_DYNAMIC)?.p_vaddr as usize) as *const Dynamic;
        let (mut names, mut symbols, mut calls, mut bytes) = (0, 0, 0, 0);
        // SAFETY: the section ends with an entry of tag 0.
        while let Dynamic { tag: 1.., value } = *unsafe { &*entry } {
            // SAFETY: as above.
            let tag = unsafe { &*entry }.tag;
            // The loader has made these addresses, or left them relative to the library.
            let address = if value < base { base + value } else { value };
            match tag {
                STRTAB => names = address,
                SYMTAB => symbols = address,
                JMPREL => calls = address,
                PLTRELSZ => bytes = value,
                _ => {}
            }
            entry = entry.wrapping_add(1);
        }
        let fixed = of_type(libc::PT_GNU_RELRO).map_or(0..0, |h| {
            let start = base + h.p_vaddr as usize;
            start..start + h.p_memsz as usize
        });
        let count = bytes / size_of::<libc::Elf64_Rela>();
        let all = names != 0 && symbols != 0 && calls != 0;
        all.then_some(Loaded { base, symbols: symbols as _, names, calls: (calls as _, count), fixed })
    }

    /// Writes the slot; false if there is none.
    ///
    /// # Safety
    /// The library stays loaded.
    unsafe fn replace(&self) -> bool {
        // SAFETY: the dynamic section says where they are and how many.
        let calls = unsafe { std::slice::from_raw_parts(self.calls.0, self.calls.1) };
        let asks = |call: &&libc::Elf64_Rela| {
            // SAFETY: a relocation's symbol is in the table, and the symbol's name is a C string.
            let name = unsafe {
                let symbol = &*self.symbols.add((call.r_info >> 32) as usize);
                CStr::from_ptr((self.names + symbol.st_name as usize) as *const _)
            };
            name == ASKED
        };
        let Some(call) = calls.iter().find(asks) else { return false };
        let slot = self.base + call.r_offset as usize;
        if self.fixed.contains(&slot) && !writable(slot) {
            return false;
        }
        // SAFETY: an aligned pointer in memory that can be written; others call through it at any time.
        let slot = unsafe { AtomicPtr::from_ptr(slot as *mut *mut c_void) };
        slot.store(is_accelerator as *mut c_void, SeqCst);
        true
    }
}

/// Makes the page of an address writable.
fn writable(address: usize) -> bool {
    // SAFETY: a question without arguments that matter.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let start = address & !(page - 1);
    // SAFETY: the page is of a library that is loaded, and was writable while that was.
    unsafe { libc::mprotect(start as *mut c_void, page, libc::PROT_READ | libc::PROT_WRITE) == 0 }
}
