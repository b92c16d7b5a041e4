//! The functions that a loaded library imports, and others in their place.
//!
//! A library calls what it imports through a table of addresses, which the loader fills in by the library's relocations (ELF,
//! "Procedure Linkage Table"). Other libraries have tables of their own.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::size_of;
use std::sync::atomic::{AtomicPtr, Ordering};

/// An entry of `PT_DYNAMIC`.
#[repr(C)]
struct Dynamic {
    tag: i64,
    value: usize,
}

#[repr(C)]
struct Relocation {
    offset: usize,
    /// The symbol in the upper half, the kind in the lower.
    info: u64,
    addend: i64,
}

#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: usize,
    size: usize,
}

const DT_NULL: i64 = 0;
const DT_PLTRELSZ: i64 = 2;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_RELA: i64 = 7;
const DT_RELASZ: i64 = 8;
const DT_JMPREL: i64 = 23;

/// `GLOB_DAT` and `JUMP_SLOT`: the relocations whose place is to hold the address of a symbol.
#[cfg(target_arch = "x86_64")]
const ADDRESSES: [u32; 2] = [6, 7];
#[cfg(target_arch = "aarch64")]
const ADDRESSES: [u32; 2] = [1025, 1026];

/// Where a library lies.
struct Library {
    /// What is looked for: an address in it.
    inside: usize,
    base: usize,
    dynamic: *const Dynamic,
    /// What the loader has made read-only, from and to.
    protected: (usize, usize),
}

/// Has the library that holds the address `inside` call a function in place of the one that it imports by a name; whether it
/// imports one.
///
/// # Safety
/// The function has the type that the library expects of the name, and both stay for ever.
pub unsafe fn replace(inside: *const c_void, name: &CStr, function: *mut c_void) -> bool {
    let mut library =
        Library { inside: inside as usize, base: 0, dynamic: std::ptr::null(), protected: (0, 0) };
    // SAFETY: `find` takes what `dl_iterate_phdr` gives it, and the library that outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(find), (&raw mut library).cast()) };
    if library.dynamic.is_null() {
        return false;
    }
    // SAFETY: the loader has mapped the dynamic section and what it points at.
    unsafe { library.replace(name, function) }
}

unsafe extern "C" fn find(info: *mut libc::dl_phdr_info, _size: usize, found: *mut c_void) -> c_int {
    // SAFETY: the loader's description of a library is valid during the call, and `found` is what `replace` handed over.
    let (info, library) = unsafe { (&*info, &mut *found.cast::<Library>()) };
    // SAFETY: as many headers as the loader says.
    let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
    let base = info.dlpi_addr as usize;
    let span = |h: &libc::Elf64_Phdr| (base + h.p_vaddr as usize, base + (h.p_vaddr + h.p_memsz) as usize);
    let holds = |h: &libc::Elf64_Phdr| {
        let (from, to) = span(h);
        h.p_type == libc::PT_LOAD && (from..to).contains(&library.inside)
    };
    if !headers.iter().any(holds) {
        return 0;
    }
    library.base = base;
    for header in headers {
        match header.p_type {
            libc::PT_DYNAMIC => library.dynamic = span(header).0 as *const Dynamic,
            libc::PT_GNU_RELRO => library.protected = span(header),
            _ => {}
        }
    }
    1
}

impl Library {
    /// # Safety
    /// `dynamic` is the dynamic section of a library that the loader has mapped at `base`.
    unsafe fn replace(&self, name: &CStr, function: *mut c_void) -> bool {
        let value = |tag: i64| {
            let mut at = self.dynamic;
            // SAFETY: the section ends with an entry of DT_NULL.
            unsafe {
                while (*at).tag != DT_NULL && (*at).tag != tag {
                    at = at.add(1);
                }
                ((*at).tag == tag).then_some((*at).value)
            }
        };
        // glibc writes addresses over the offsets that the file has, other loaders leave those.
        let address = |tag| value(tag).map(|v| if v < self.base { v + self.base } else { v });
        let (Some(symbols), Some(names)) = (address(DT_SYMTAB), address(DT_STRTAB)) else { return false };
        let mut replaced = false;
        for (table, bytes) in [(DT_RELA, DT_RELASZ), (DT_JMPREL, DT_PLTRELSZ)] {
            let (Some(table), Some(bytes)) = (address(table), value(bytes)) else { continue };
            // SAFETY: the table that the section describes.
            let relocations = unsafe {
                std::slice::from_raw_parts(table as *const Relocation, bytes / size_of::<Relocation>())
            };
            for r in relocations.iter().filter(|r| ADDRESSES.contains(&(r.info as u32))) {
                // SAFETY: the relocation's symbol is in the table of symbols, and its name among the names.
                let imported = unsafe {
                    let symbol = &*(symbols as *const Symbol).add((r.info >> 32) as usize);
                    CStr::from_ptr((names as *const c_char).add(symbol.name as usize))
                };
                if imported == name {
                    // SAFETY: the place of such a relocation holds an address.
                    replaced |= unsafe { self.put(self.base + r.offset, function) };
                }
            }
        }
        replaced
    }

    /// Puts an address to its place, if the system lets it.
    ///
    /// # Safety
    /// `place` is that of a relocation of this library.
    unsafe fn put(&self, place: usize, function: *mut c_void) -> bool {
        // SAFETY: asks for a number.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let (from, to) = self.protected;
        let protected = (from..to).contains(&place);
        let start = (place / page * page) as *mut c_void;
        // SAFETY: a page of the library's data; the place is aligned, so the word is in it.
        let protect = |how| unsafe { libc::mprotect(start, page, how) } == 0;
        if protected && !protect(libc::PROT_READ | libc::PROT_WRITE) {
            return false;
        }
        // SAFETY: the place is an aligned word, which other threads only read.
        unsafe { AtomicPtr::from_ptr(place as *mut *mut c_void) }.store(function, Ordering::Release);
        !protected || protect(libc::PROT_READ)
    }
}
