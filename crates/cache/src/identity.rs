//! What a large file is, without reading it in each process.

use crate::key::hex;
use crate::store::{Folder, Sharing, Store};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The blake3 digest of a file, in hexadecimal digits. If a cache folder is given, it is remembered there for as long as the
/// file's path, size and times stay the same.
pub fn file_digest(file: &Path, cache: Option<&Path>) -> io::Result<String> {
    let file = fs::canonicalize(file)?;
    let meta = fs::metadata(&file)?;
    let times = (meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec());
    let identity = format!("{} {} {} {} {times:?}", file.display(), meta.dev(), meta.ino(), meta.size());
    let name = hex(blake3::hash(identity.as_bytes()).as_bytes());
    let memo = cache.map(|c| Folder::within(c, c.join("digests"), Sharing::Machine));
    // A memo that cannot be read or written costs time and nothing else.
    let known = memo.as_ref().and_then(|m| m.read(&name).ok().flatten());
    if let Some(known) = known.and_then(|k| String::from_utf8(k).ok()).filter(|k| k.len() == 64) {
        return Ok(known);
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(File::open(&file)?)?;
    let digest = hex(hasher.finalize().as_bytes());
    if let Some(memo) = memo {
        let _ = memo.publish(&name, digest.as_bytes());
    }
    Ok(digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_file_has_another_digest() {
        let dir = tempfile::tempdir().unwrap();
        let (file, cache) = (dir.path().join("plugin.so"), dir.path().join("cache"));
        fs::write(&file, b"one").unwrap();
        let one = file_digest(&file, Some(&cache)).unwrap();
        assert_eq!(one, blake3::hash(b"one").to_hex().as_str());
        assert_eq!(file_digest(&file, Some(&cache)).unwrap(), one);
        std::thread::sleep(std::time::Duration::from_millis(10)); // file times are this coarse
        fs::write(&file, b"two").unwrap();
        assert_eq!(file_digest(&file, Some(&cache)).unwrap(), file_digest(&file, None).unwrap());
        assert_ne!(file_digest(&file, None).unwrap(), one);
    }

    #[test]
    fn a_damaged_memo_is_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("plugin.so");
        fs::write(&file, b"one").unwrap();
        let digest = file_digest(&file, Some(dir.path())).unwrap();
        let memo = fs::read_dir(dir.path().join("digests")).unwrap().next().unwrap().unwrap().path();
        fs::write(memo, b"half").unwrap();
        assert_eq!(file_digest(&file, Some(dir.path())).unwrap(), digest);
    }
}
