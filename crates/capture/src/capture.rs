//! What a run on a device that is not there leaves in a folder.

use crate::collective::{Exchanged, GroupCall};
use crate::program::{Program, Reason};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The version of the form in which captures are written.
pub const VERSION: u32 = 2;

/// What is known of all programs.
const FILE: &str = "capture.json";

/// What was asked of a device that is not there. Steps are counted from 0; what comes before the first is part of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Capture {
    /// [`VERSION`].
    pub version: u32,
    /// Training steps that have ended.
    pub steps: u64,
    /// Whether the script wanted to know the device's name or memory, so that another device could lead to other programs.
    pub described: bool,
    /// Each program that was launched.
    pub programs: Vec<Program>,
    /// Copies to the host.
    pub reads: Vec<Moved>,
    /// Copies to the device.
    pub writes: Vec<Moved>,
    /// Operations that ran on the CPU.
    pub fallbacks: Vec<FellBack>,
    /// Collectives, in their order.
    #[serde(default)]
    pub exchanges: Vec<Exchanged>,
    /// Collectives of several processes, in their order.
    #[serde(default)]
    pub group_calls: Vec<GroupCall>,
    /// The most bytes of values that were alive at once.
    pub resident_peak_bytes: u64,
}

impl Default for Capture {
    fn default() -> Capture {
        Capture {
            version: VERSION,
            steps: 0,
            described: false,
            programs: Vec::new(),
            reads: Vec::new(),
            writes: Vec::new(),
            fallbacks: Vec::new(),
            exchanges: Vec::new(),
            group_calls: Vec::new(),
            resident_peak_bytes: 0,
        }
    }
}

/// The StableHLO of programs, by their ids.
pub type Modules = Vec<(String, String)>;

/// Copies between host and device that a line makes in a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// The training step.
    pub step: u64,
    /// The Python line.
    pub line: Option<String>,
    /// How many.
    pub count: u64,
    /// Of all of them.
    pub bytes: u64,
}

/// Operations of a line that ran on the CPU in a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FellBack {
    /// The training step.
    pub step: u64,
    /// The Python line.
    pub line: Option<String>,
    /// The overload of ATen.
    pub op: String,
    /// How often.
    pub count: u64,
}

/// Why a capture cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is none, or its file cannot be read.
    #[error("cannot read {0}: {1}")]
    Io(PathBuf, io::Error),
    /// It has another form.
    #[error("{0} is no capture: {1}")]
    Form(PathBuf, serde_json::Error),
    /// Another version of oxitorch wrote it.
    #[error("{0} has version {1} of the form, and this oxitorch reads version {VERSION}: capture again")]
    Version(PathBuf, u32),
}

impl Capture {
    /// Writes it into a folder, with the StableHLO of each program by its id. It appears as a whole, and last.
    pub fn write(&self, folder: &Path, modules: &Modules) -> io::Result<()> {
        for (id, text) in modules {
            fs::write(folder.join(format!("{id}.mlir")), text)?;
        }
        let whole = folder.join(format!(".{FILE}"));
        fs::write(&whole, serde_json::to_string(self)?)?;
        fs::rename(whole, folder.join(FILE))
    }

    /// Whether a folder has one.
    pub fn is_in(folder: &Path) -> bool {
        folder.join(FILE).exists()
    }

    /// Reads the one of a folder.
    pub fn read(folder: &Path) -> Result<Capture, Error> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let path = folder.join(FILE);
        let json = fs::read(&path).map_err(|e| Error::Io(path.clone(), e))?;
        let form = |e| Error::Form(path.clone(), e);
        let found: Versioned = serde_json::from_slice(&json).map_err(form)?;
        if found.version != VERSION {
            return Err(Error::Version(path, found.version));
        }
        serde_json::from_slice(&json).map_err(form)
    }

    /// Whether another memory or kind of device could have led to other programs: the script asked for them, or a
    /// program was cut because of its memory.
    pub fn depends_on_device(&self) -> bool {
        self.described || self.programs.iter().any(|p| p.ended_by == Some(Reason::Bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cause, Collective, CompilerOption, Input, Label, Op, Output, Reduction, Role, Why};

    fn capture() -> Capture {
        let parameter = Label { role: Role::Parameter, name: Some("w".into()) };
        let ty = || "float32[2, 3]".parse().unwrap();
        let why = Why {
            number: 1,
            launched: "launched because a value was read".into(),
            nearest: None,
            cause: Cause::First,
            differences: Vec::new(),
            hint: None,
        };
        let program = Program {
            id: "a1".into(),
            name: "mm".into(),
            ended_by: Some(Reason::Step),
            ops: vec![Op { op: "mm".into(), results: vec![Some(ty()), None], ..Op::default() }],
            inputs: vec![Input { label: parameter, donated: true, ..Input::new(ty(), 24) }],
            outputs: vec![Output::new(Some(ty()), 24, 0)],
            launches: vec![(0, 1), (1, 2)],
            options: [("xla_level".to_owned(), CompilerOption::Int(1))].into(),
            why: Some(why),
            ..Program::default()
        };
        let exchanges = [Collective::AllReduce(Reduction::Average), Collective::Permute(vec![(0, 1)])];
        let exchanges = exchanges.map(|collective| Exchanged {
            step: 1,
            line: None,
            collective,
            groups: vec![vec![0, 4]],
            number: 0,
            r#type: ty(),
            bytes: 24,
        });
        Capture { steps: 2, programs: vec![program], exchanges: exchanges.into(), ..Capture::default() }
    }

    #[test]
    fn a_capture_is_the_same_after_writing_and_reading() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!Capture::is_in(folder.path()) && matches!(Capture::read(folder.path()), Err(Error::Io(..))));
        let written = capture();
        written.write(folder.path(), &vec![("a1".into(), "module".into())]).unwrap();
        assert_eq!(Capture::read(folder.path()).unwrap(), written);
        assert_eq!(fs::read_to_string(folder.path().join("a1.mlir")).unwrap(), "module");
        assert_eq!((written.programs[0].launches_in(1), written.programs[0].donated_bytes()), (2, 24));
    }

    #[test]
    fn other_versions_are_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        for (text, words) in
            [(r#"{"version": 1}"#, "version 1"), ("{}", "is no capture"), ("", "is no capture")]
        {
            fs::write(folder.path().join(FILE), text).unwrap();
            let error = Capture::read(folder.path()).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn a_window_that_memory_has_ended_depends_on_the_device() {
        let mut capture = capture();
        assert!(!capture.depends_on_device());
        capture.programs[0].ended_by = Some(Reason::Bytes);
        assert!(capture.depends_on_device());
    }
}
