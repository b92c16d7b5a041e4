//! The file of one entry.
//!
//! | bytes | what |
//! |---|---|
//! | 8 | magic with the version of the format |
//! | 8 | hits, little endian; counted in place, not part of the checksum |
//! | 32 | blake3 of everything that follows |
//! | 4 | length of the description, little endian |
//! | 8 | length of the payload, little endian |
//! | | description, JSON |
//! | | payload |

use crate::key::Key;
use serde::{Deserialize, Serialize};

/// The version of the file format; part of the magic and of the folder's name.
pub const FORMAT: u32 = 1;
const MAGIC: &[u8; 8] = b"oxicach1";
pub(crate) const HITS_AT: u64 = 8;
/// Bytes before the description.
pub(crate) const HEADER: usize = 60;
const SUMMED: usize = 48;
/// A longer description is damage: nobody writes one.
const MAX_META: usize = 1 << 20;

/// What can be known of an entry without its payload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meta {
    /// What the payload depends on.
    pub key: Key,
    /// For people: the program's name.
    pub name: String,
    /// For people and for finding similar entries: more about the program, by name.
    #[serde(default)]
    pub notes: Vec<(String, String)>,
    /// When it was written, in milliseconds since 1970.
    pub created_ms: u64,
    /// What making it took, in microseconds.
    pub cost_us: u64,
}

/// Why bytes are not an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Damaged(pub(crate) &'static str);

pub(crate) fn encode(meta: &Meta, payload: &[u8]) -> Result<Vec<u8>, Damaged> {
    let description = serde_json::to_vec(meta).map_err(|_| Damaged("the description cannot be written"))?;
    if description.len() > MAX_META {
        return Err(Damaged("the description is too long"));
    }
    let mut out = Vec::with_capacity(HEADER + description.len() + payload.len());
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&[0; 8]);
    out.extend_from_slice(&[0; 32]);
    out.extend_from_slice(&(description.len() as u32).to_le_bytes());
    out.extend_from_slice(&(payload.len() as u64).to_le_bytes());
    out.extend_from_slice(&description);
    out.extend_from_slice(payload);
    let sum = *blake3::hash(&out[SUMMED..]).as_bytes();
    out[SUMMED - 32..SUMMED].copy_from_slice(&sum);
    Ok(out)
}

/// The sizes in a header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Header {
    pub(crate) hits: u64,
    pub(crate) meta: usize,
    payload: u64,
}

/// Reads a header; `file_len` is what the whole file has.
pub(crate) fn header(bytes: &[u8], file_len: u64) -> Result<Header, Damaged> {
    let bytes = bytes.get(..HEADER).ok_or(Damaged("shorter than a header"))?;
    let number =
        |at: usize, n: usize| bytes[at..at + n].iter().rev().fold(0u64, |sum, &b| sum << 8 | u64::from(b));
    if &bytes[..8] != MAGIC {
        return Err(Damaged("not an entry of this version"));
    }
    let header = Header { hits: number(8, 8), meta: number(48, 4) as usize, payload: number(52, 8) };
    if header.meta > MAX_META {
        return Err(Damaged("a description of impossible length"));
    }
    match (HEADER as u64 + header.meta as u64).checked_add(header.payload) {
        Some(sum) if sum == file_len => Ok(header),
        _ => Err(Damaged("its length is not what its header says")),
    }
}

/// Reads a description.
pub(crate) fn meta(bytes: &[u8]) -> Result<Meta, Damaged> {
    serde_json::from_slice(bytes).map_err(|_| Damaged("the description cannot be read"))
}

/// A whole entry: its description and its payload, if everything is as it was written.
pub(crate) fn decode(bytes: &[u8]) -> Result<(Meta, &[u8]), Damaged> {
    let header = header(bytes, bytes.len() as u64)?;
    if blake3::hash(&bytes[SUMMED..]).as_bytes() != &bytes[SUMMED - 32..SUMMED] {
        return Err(Damaged("checksum"));
    }
    let (description, payload) = bytes[HEADER..].split_at(header.meta);
    Ok((meta(description)?, payload))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> (Meta, Vec<u8>) {
        let meta = Meta {
            key: Key::new().with("module", b"m").with("options", b"o"),
            name: "add".into(),
            notes: vec![("inputs".into(), "f32[4]".into())],
            created_ms: 12,
            cost_us: 34,
        };
        let bytes = encode(&meta, b"payload").unwrap();
        (meta, bytes)
    }

    #[test]
    fn what_was_written_is_read() {
        let (meta, bytes) = sample();
        assert_eq!(decode(&bytes).unwrap(), (meta, &b"payload"[..]));
    }

    #[test]
    fn every_damaged_byte_is_seen_but_those_of_the_hits() {
        let (_, bytes) = sample();
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert_eq!(decode(&damaged).is_err(), !(8..16).contains(&at), "byte {at}");
        }
    }

    #[test]
    fn every_other_length_is_seen() {
        let (_, bytes) = sample();
        for len in 0..bytes.len() {
            assert!(decode(&bytes[..len]).is_err(), "{len} bytes");
        }
        let longer = [&bytes[..], b"x"].concat();
        assert!(decode(&longer).is_err());
    }
}
