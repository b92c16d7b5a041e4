//! The flight recorder: the latest collectives of this process, in a file that outlives it.
//!
//! One slot of fixed size for each, in turn, as a line of JSON: who reads sees whole lines at any moment, of a process
//! that runs, hangs, or is gone. The threads of process groups write it, before and after each collective.

use crate::site::Site;
use crate::work::About;
use parking_lot::Mutex;
use serde_json::json;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// How many are kept.
const SLOTS: u64 = 64;
/// Bytes of each, with the end of the line.
const SLOT: usize = 1024;

/// The recorder of a process; it does nothing until it has a file.
#[derive(Debug, Default)]
pub(crate) struct Flight(Mutex<Option<Recorder>>);

#[derive(Debug)]
struct Recorder {
    file: File,
    next: u64,
}

/// A collective that is being recorded.
pub(crate) struct Entry {
    slot: u64,
    text: serde_json::Value,
}

impl Flight {
    /// Records into this file from now on; `head` is its first line.
    pub(crate) fn open(&self, path: &Path, head: &str) -> io::Result<()> {
        let file = File::create(path)?;
        write(&file, 0, head)?;
        *self.0.lock() = Some(Recorder { file, next: 0 });
        Ok(())
    }

    /// This process begins with a collective; `call` names it with its tensors.
    pub(crate) fn begin(&self, about: &About, call: &str, site: Site) -> Option<Entry> {
        let mut recorder = self.0.lock();
        let recorder = recorder.as_mut()?;
        let line = site.describe().unwrap_or_default();
        let skip = line.char_indices().rev().nth(LINE).map_or(0, |(i, _)| i);
        let text = json!({
            "entry": recorder.next,
            "group": about.group.name,
            "number": about.number,
            "what": call,
            "line": &line[skip..],
            "state": "waits",
            "began_unix_s": now(),
        });
        let slot = 1 + recorder.next % SLOTS;
        recorder.next += 1;
        let _ = write(&recorder.file, slot, &text.to_string()); // a full disk stops no training
        Some(Entry { slot, text })
    }

    /// It is done, or has failed.
    pub(crate) fn end(&self, entry: Option<Entry>, failed: bool) {
        if let (Some(mut entry), Some(recorder)) = (entry, &*self.0.lock()) {
            entry.text["state"] = if failed { "failed" } else { "done" }.into();
            entry.text["ended_unix_s"] = now().into();
            let _ = write(&recorder.file, entry.slot, &entry.text.to_string());
        }
    }
}

/// Characters of a Python line.
const LINE: usize = 300;

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn write(file: &File, slot: u64, text: &str) -> io::Result<()> {
    let mut bytes = [b' '; SLOT];
    let len = text.len().min(SLOT - 1);
    bytes[..len].copy_from_slice(&text.as_bytes()[..len]);
    bytes[SLOT - 1] = b'\n';
    file.write_all_at(&bytes, slot * SLOT as u64)
}
