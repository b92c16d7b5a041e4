//! YAML and JSON: keys and values, and commands that stand in them.

use std::path::Path;

use serde_json::Value;

use super::{Asked, range_of, requirements, shell};

/// Words that a command in YAML begins with.
const PROGRAMS: &[&str] =
    &["python", "python3", "torchrun", "deepspeed", "accelerate", "nvidia-smi", "pip", "docker", "export"];

/// A YAML file, line by line: `key: value`, list items, and lines of blocks that are commands.
pub(super) fn yaml(path: &Path, text: &str, asked: &mut Asked) {
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default().to_ascii_lowercase();
    let packages = name.contains("env") || name.contains("conda");
    // Where packages come from is no package.
    let mut channels = false;
    for whole in text.lines() {
        let line = uncommented(whole).trim();
        let item = line.strip_prefix("- ");
        let line = item.unwrap_or(line).trim();
        if line.is_empty() {
            continue;
        }
        if PROGRAMS.contains(&line.split_whitespace().next().unwrap_or_default()) {
            shell::command_line(text, line, shell::Place::Command, asked);
            continue;
        }
        let Some((key, value)) = line.split_once(": ").or(line.strip_suffix(':').map(|k| (k, ""))) else {
            if item.is_some() {
                let range = range_of(text, line);
                let word = line.trim_matches(['"', '\'']);
                asked.argument(word, range.clone());
                match word.split_once('=') {
                    Some((variable, _)) if !packages => asked.variable(variable, range),
                    _ if packages && !channels => requirements::package(text, word, asked),
                    _ => {}
                }
            }
            continue;
        };
        let key = key.trim_matches(['"', '\'', ' ']);
        let value = value.trim().trim_matches(['"', '\'']);
        channels = key == "channels";
        let range = range_of(text, line);
        asked.setting(key, value, range.clone());
        asked.variable(key, range.clone());
        if key == "name" || key == "key" {
            asked.variable(value, range.clone());
        }
        if PROGRAMS.contains(&value.split_whitespace().next().unwrap_or_default()) {
            shell::command_line(text, value, shell::Place::Command, asked);
        }
    }
}

/// A line without its comment.
fn uncommented(line: &str) -> &str {
    if line.trim_start().starts_with('#') {
        return "";
    }
    line.find(" #").map_or(line, |at| &line[..at])
}

/// What a JSON file has to have a word of to be read.
const WORDS: &[&str] =
    &["zero_optimization", "\"fp16\"", "nccl", "mixed_precision", "distributed_type", "MULTI_GPU"];

/// A JSON file.
pub(super) fn json(text: &str, asked: &mut Asked) {
    if !WORDS.iter().any(|w| memchr::memmem::find(text.as_bytes(), w.as_bytes()).is_some()) {
        return;
    }
    if let Ok(value) = serde_json::from_str::<Value>(text) {
        let mut from = 0;
        settings(text, &value, &mut from, asked);
    }
}

/// The keys of a value, in the order in which they stand.
fn settings(text: &str, value: &Value, from: &mut usize, asked: &mut Asked) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let quoted = format!("\"{key}\"");
                // Keys come sorted or in order; one that is not found behind is looked for from the beginning.
                let at = text[*from..].find(&quoted).map(|n| n + *from).or_else(|| text.find(&quoted));
                let at = at.unwrap_or(0);
                let word = match value {
                    Value::String(s) => s.clone(),
                    Value::Bool(_) | Value::Number(_) => value.to_string(),
                    _ => String::new(),
                };
                asked.setting(key, &word, at..(at + quoted.len()).min(text.len()));
                *from = at;
                settings(text, value, from, asked);
            }
        }
        Value::Array(all) => all.iter().for_each(|v| settings(text, v, from, asked)),
        _ => {}
    }
}
