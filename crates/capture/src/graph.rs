//! A program that ran, with what its compiler and its launches say: for `torch.tpu.graphs` and `oxitorch graphs`.

use crate::program::{Op, Reason};
use crate::tensor::TensorType;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

/// Where an executable came from first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// The compiler.
    Compiled,
    /// A cache folder.
    Loaded,
    /// Another program of this process has it.
    Memory,
    /// It is not there yet.
    Pending,
}

impl Origin {
    /// In a word, as it is written.
    pub fn name(self) -> &'static str {
        match self {
            Origin::Compiled => "compiled",
            Origin::Loaded => "loaded",
            Origin::Memory => "memory",
            Origin::Pending => "pending",
        }
    }
}

/// What a plugin says of a program's cost: a number mostly.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Cost {
    /// A whole number.
    Int(i64),
    /// A number, as exact as the plugin has it.
    Float(f32),
    /// Anything else, such as a number that JSON has not.
    Text(String),
}

impl Cost {
    /// As a number, if it is one.
    pub fn number(&self) -> Option<f64> {
        match self {
            Cost::Int(x) => Some(*x as f64),
            Cost::Float(x) => Some(f64::from(*x)),
            Cost::Text(_) => None,
        }
    }
}

/// What a program needs on the device, in bytes, as its compiler says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryBytes {
    /// Its arguments.
    pub arguments: i64,
    /// Its outputs.
    pub outputs: i64,
    /// Outputs that take the memory of arguments.
    pub aliased: i64,
    /// What it needs while it runs.
    pub temporaries: i64,
    /// What it keeps in the memory of the host meanwhile.
    #[serde(default)]
    pub host_temporaries: i64,
    /// The most at once; 0 if the compiler does not say.
    pub peak: i64,
    /// Its machine code.
    pub code: i64,
}

/// A program of a process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Graph {
    /// The beginning of its key in the cache, hexadecimal.
    pub id: String,
    /// For people: its first and last operations.
    pub name: String,
    /// The first Python line in it that is known.
    pub first_line: Option<String>,
    /// Why it ended.
    pub ended_by: Option<Reason>,
    /// Which collective that is, if one is the reason: `all_reduce(float32[1000]), number 3 of group 0`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_by_collective: Option<String>,
    /// The Python line at which it ended.
    pub ended_at: Option<String>,
    /// Where its executable came from.
    pub from: Origin,
    /// Seconds that compiling or loading took.
    pub compile_s: f64,
    /// What goes in.
    pub inputs: Vec<TensorType>,
    /// What comes out; none for a number that checks others.
    pub outputs: Vec<Option<TensorType>>,
    /// The places of inputs whose memory outputs take.
    pub donated: Vec<u32>,
    /// Its operations in order.
    pub ops: Vec<Op>,
    /// How often it was launched.
    pub launches: u64,
    /// Seconds on the device, all launches together.
    pub device_s: f64,
    /// What the plugin estimates, by its names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub cost: BTreeMap<String, Cost>,
    /// What it needs, if the plugin says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<MemoryBytes>,
    /// Counted from the start of the process, in a list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub number: Option<usize>,
}

impl Graph {
    /// As JSON.
    pub fn to_json(&self) -> String {
        serde_json::json!(self).to_string()
    }

    /// Writes it into a folder. It appears as a whole: other processes may write the same program.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        let temporary = folder.join(format!(".{}.{}", self.id, std::process::id()));
        fs::write(&temporary, serde_json::to_string_pretty(self)?)?;
        fs::rename(temporary, folder.join(format!("{}.json", self.id)))
    }

    /// The graphs of a folder.
    pub fn read_all(folder: &Path) -> io::Result<Vec<Graph>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let is_hidden = path.file_name().is_some_and(|n| n.to_string_lossy().starts_with('.'));
            if path.extension().is_some_and(|e| e == "json") && !is_hidden {
                let in_file = |e: &dyn std::fmt::Display| {
                    io::Error::other(format!("{} is no captured program: {e}", path.display()))
                };
                let text = fs::read_to_string(&path).map_err(|e| in_file(&e))?;
                found.push(serde_json::from_str(&text).map_err(|e| in_file(&e))?);
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph() -> Graph {
        let cost = [("flops", Cost::Float(0.1)), ("calls", Cost::Int(3)), ("time", Cost::Text("inf".into()))];
        Graph {
            id: "a1".into(),
            name: "mm".into(),
            first_line: None,
            ended_by: Some(Reason::Read),
            ended_by_collective: None,
            ended_at: None,
            from: Origin::Loaded,
            compile_s: 0.5,
            inputs: vec!["float32[2, 3]".parse().unwrap()],
            outputs: vec![None],
            donated: vec![0],
            ops: Vec::new(),
            launches: 2,
            device_s: 0.25,
            cost: cost.map(|(name, x)| (name.to_owned(), x)).into(),
            memory_bytes: Some(MemoryBytes { peak: 7, ..MemoryBytes::default() }),
            number: None,
        }
    }

    #[test]
    fn a_graph_is_the_same_after_writing_and_reading() {
        let folder = tempfile::tempdir().unwrap();
        let written = graph();
        written.write(folder.path()).unwrap();
        fs::write(folder.path().join(".b2.7"), "half").unwrap();
        assert_eq!(Graph::read_all(folder.path()).unwrap(), std::slice::from_ref(&written));
        assert!(written.to_json().contains(r#""flops":0.1"#), "{}", written.to_json());
    }

    #[test]
    fn a_file_that_is_no_graph_is_named() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("odd.json"), "{}").unwrap();
        let error = Graph::read_all(folder.path()).unwrap_err().to_string();
        assert!(error.contains("odd.json is no captured program"), "{error}");
    }
}
