//! The bytes of a buffer for code outside the plugin: where they are, if that is the host's memory, else copies of them.

use std::ops::{Deref, DerefMut};

use crate::buffer::{Buffer, ExternalReference};
use crate::error::Result;

/// The bytes of a value, row-major.
pub struct Bytes<'a>(Memory<ExternalReference<'a>>);

enum Memory<P> {
    /// The buffer's own memory, which stays where it is.
    Pinned(P, usize),
    Copied(Vec<u8>),
}

impl Buffer {
    /// Waits for the value and gives its bytes.
    pub fn bytes(&self) -> Result<Bytes<'_>> {
        Ok(Bytes(match self.pin()? {
            Some(reference) => Memory::Pinned(reference, self.size_bytes()),
            None => Memory::Copied(self.copied()?),
        }))
    }

    /// Waits for the value and gives its bytes, to be overwritten. What programs that were launched with the buffer and
    /// still run read is not said: they are to be waited for.
    pub fn bytes_mut(&mut self) -> Result<BytesMut<'_>> {
        let bytes = match self.pin()? {
            Some(reference) => {
                let address = reference.address();
                std::mem::forget(reference); // it is given back with what is made here
                Memory::Pinned(address, self.size_bytes())
            }
            None => Memory::Copied(self.copied()?),
        };
        Ok(BytesMut { buffer: self, bytes })
    }

    fn copied(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.size_bytes()];
        self.to_host(&mut bytes)?;
        Ok(bytes)
    }
}

impl Deref for Bytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            // SAFETY: the memory has so many bytes, is pinned, and nobody writes a value that others can see.
            Memory::Pinned(reference, len) => unsafe {
                std::slice::from_raw_parts(reference.address() as *const u8, *len)
            },
            Memory::Copied(bytes) => bytes,
        }
    }
}

/// The bytes of a value that is about to become another one, row-major.
pub struct BytesMut<'a> {
    buffer: &'a mut Buffer,
    bytes: Memory<usize>,
}

impl BytesMut<'_> {
    /// Has the buffer hold what was written.
    pub fn write_back(self) -> Result<()> {
        let Memory::Copied(bytes) = &self.bytes else { return Ok(()) };
        let old = &*self.buffer;
        let new = old.client().buffer_from_host(bytes, old.dtype(), old.dims(), old.device())?;
        *self.buffer = new;
        Ok(())
    }
}

impl Deref for BytesMut<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.bytes {
            // SAFETY: as in `deref_mut`.
            Memory::Pinned(address, len) => unsafe {
                std::slice::from_raw_parts(*address as *const u8, *len)
            },
            Memory::Copied(bytes) => bytes,
        }
    }
}

impl DerefMut for BytesMut<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.bytes {
            // SAFETY: the memory has so many bytes and is pinned, and the buffer is borrowed for this alone.
            Memory::Pinned(address, len) => unsafe {
                std::slice::from_raw_parts_mut(*address as *mut u8, *len)
            },
            Memory::Copied(bytes) => bytes,
        }
    }
}

impl Drop for BytesMut<'_> {
    fn drop(&mut self) {
        if matches!(self.bytes, Memory::Pinned(..)) {
            self.buffer.unpin();
        }
    }
}
