//! The header of serialized executables. Plugins abort the process, or run nonsense, on bytes that are damaged; so the
//! bytes carry a checksum, and the identity of the plugin that alone can read them.
//!
//! Layout: magic (8 bytes), length of the identity (4, little endian), identity, BLAKE3 of identity and payload (32),
//! payload.

use crate::api::Api;
use crate::error::{Error, Result};

const MAGIC: &[u8; 8] = b"oxipjrt1";

pub(crate) fn wrap(api: &Api, payload: &[u8]) -> Vec<u8> {
    wrap_for(&identity(api), payload)
}

pub(crate) fn unwrap<'a>(api: &Api, bytes: &'a [u8]) -> Result<&'a [u8]> {
    unwrap_for(&identity(api), bytes)
}

fn identity(api: &Api) -> String {
    let (major, minor) = api.version();
    format!("{} {major}.{minor}", api.platform())
}

fn wrap_for(identity: &str, payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(MAGIC.len() + 4 + identity.len() + 32 + payload.len());
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&(identity.len() as u32).to_le_bytes());
    out.extend_from_slice(identity.as_bytes());
    out.extend_from_slice(checksum(identity.as_bytes(), payload).as_bytes());
    out.extend_from_slice(payload);
    out
}

fn unwrap_for<'a>(identity: &str, bytes: &'a [u8]) -> Result<&'a [u8]> {
    let (theirs, sum, payload) = split(bytes).ok_or_else(|| bad("no header of this program"))?;
    if checksum(theirs, payload).as_bytes() != sum {
        return Err(bad("the bytes are damaged (checksum)"));
    }
    if theirs != identity.as_bytes() {
        let theirs = String::from_utf8_lossy(theirs);
        return Err(bad(&format!("made by plugin `{theirs}`, the one in use is `{identity}`")));
    }
    Ok(payload)
}

fn split(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let rest = bytes.strip_prefix(MAGIC)?;
    let (len, rest) = rest.split_first_chunk::<4>()?;
    let (identity, rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    let (sum, payload) = rest.split_at_checked(32)?;
    Some((identity, sum, payload))
}

fn checksum(identity: &[u8], payload: &[u8]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(identity);
    hasher.update(payload);
    hasher.finalize()
}

fn bad(reason: &str) -> Error {
    Error::BadSerialized { reason: reason.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_damage_is_noticed() {
        let good = wrap_for("cpu 0.81", b"payload");
        assert_eq!(unwrap_for("cpu 0.81", &good).unwrap(), b"payload");
        for i in 0..good.len() {
            let mut bad = good.clone();
            bad[i] ^= 1;
            assert!(unwrap_for("cpu 0.81", &bad).is_err(), "flip at {i}");
            assert!(unwrap_for("cpu 0.81", &good[..i]).is_err(), "cut at {i}");
        }
        let error = unwrap_for("cpu 0.82", &good).unwrap_err().to_string();
        assert!(error.contains("cpu 0.81") && error.contains("cpu 0.82"), "{error}");
    }
}
