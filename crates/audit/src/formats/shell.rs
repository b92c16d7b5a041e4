//! Shell scripts and Dockerfiles: words of commands.

use super::{Asked, range_of};

/// A script.
pub(super) fn read(text: &str, asked: &mut Asked) {
    let mut place = Place::Command;
    for line in text.lines() {
        if let Some(options) = line.trim_start().strip_prefix("#SBATCH") {
            options.split_whitespace().for_each(|w| asked.argument(w, range_of(text, w)));
            continue;
        }
        place = command_line(text, line, place, asked);
    }
}

/// The instructions of a Dockerfile.
pub(super) fn dockerfile(text: &str, asked: &mut Asked) {
    let mut running = false;
    let mut place = Place::Command;
    for line in text.lines() {
        let trimmed = line.trim_start();
        if trimmed.starts_with('#') {
            continue;
        }
        if running {
            place = command_line(text, trimmed, place, asked);
            running = line.trim_end().ends_with('\\');
            continue;
        }
        let Some((instruction, rest)) = trimmed.split_once(char::is_whitespace) else { continue };
        match instruction.to_ascii_uppercase().as_str() {
            "FROM" => {
                let image = rest.split_whitespace().find(|w| !w.starts_with("--")).unwrap_or_default();
                asked.setting("FROM", image, range_of(text, trimmed.trim_end()));
            }
            "ENV" | "ARG" => {
                let names = rest.split_whitespace().filter_map(|w| w.split_once('=').map(|(n, _)| n));
                let first = rest.split_whitespace().next().filter(|w| !w.contains('='));
                names.chain(first).for_each(|n| asked.variable(n, range_of(text, n)));
            }
            "RUN" | "CMD" | "ENTRYPOINT" => {
                place = command_line(text, rest, Place::Command, asked);
                running = line.trim_end().ends_with('\\');
            }
            _ => {}
        }
    }
}

/// Where the next word stands.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// A program's name or an assignment before it.
    Command,
    /// The module behind `-m`, of a program that is Python.
    Module,
    Argument {
        python: bool,
        /// Whether the program places others on machines, so that its options ask for devices.
        places: bool,
    },
    /// What is printed and not run.
    Printed,
}

/// Programs that run the program behind them.
const BEFORE: &[&str] = &[
    "sudo", "env", "exec", "nohup", "time", "srun", "export", "then", "do", "else", "numactl", "nice", "if",
    "!", "set", "-x",
];

/// Programs that take GPUs for others.
const PLACES: &[&str] = &[
    "docker",
    "podman",
    "nvidia-docker",
    "singularity",
    "apptainer",
    "srun",
    "sbatch",
    "salloc",
    "deepspeed",
    "accelerate",
    "torchrun",
    "ray",
    "kubectl",
    "gcloud",
    "enroot",
    "sky",
];

/// Options that ask for GPUs, and that scripts have for themselves, too.
const FOR_GPUS: &[&str] = &["--gpus", "--num-gpus", "--num_gpus", "--gpus-per-node"];

/// One line, which begins where the line before left off.
pub(super) fn command_line(text: &str, line: &str, mut place: Place, asked: &mut Asked) -> Place {
    let mut before: Option<&str> = None;
    for word in words(line) {
        let range = range_of(text, word);
        let bare = word.trim_matches(['"', '\'', '[', ']', ',']);
        if matches!(bare, ";" | "&&" | "||" | "|" | "&" | "{" | "(") {
            place = Place::Command;
            continue;
        }
        if bare == "\\" {
            continue;
        }
        let ends = word.ends_with(';');
        let bare = bare.trim_end_matches(';');
        place = match place {
            Place::Command => match bare.split_once('=') {
                Some((name, _)) if is_name(name) => {
                    asked.variable(name, range);
                    Place::Command
                }
                _ if BEFORE.contains(&bare) || bare.is_empty() => Place::Command,
                // An option of a program that runs another.
                _ if bare.starts_with('-') => {
                    asked.argument(bare, range);
                    Place::Command
                }
                _ => {
                    let program = bare.rsplit('/').next().unwrap_or(bare);
                    asked.command(program, range);
                    match program {
                        "echo" | "printf" => Place::Printed,
                        _ => Place::Argument {
                            python: program.starts_with("python"),
                            places: PLACES.contains(&program),
                        },
                    }
                }
            },
            Place::Module => {
                asked.command(bare, range);
                Place::Argument { python: false, places: true }
            }
            Place::Argument { python: true, .. } if bare == "-m" => Place::Module,
            Place::Argument { python, places } => {
                let own =
                    |option: &str| !places && FOR_GPUS.contains(&option.split('=').next().unwrap_or(option));
                if !own(bare) {
                    asked.argument(bare, range.clone());
                }
                if let Some(option) = before
                    .filter(|b| b.starts_with("--") && !b.contains('=') && !bare.starts_with('-') && !own(b))
                {
                    asked.argument(&format!("{option}={bare}"), range);
                }
                if bare == "deepspeed" || bare == "nvidia-smi" {
                    asked.command(bare, range_of(text, word));
                }
                // Behind the script, `-m` is the script's.
                Place::Argument { python: python && bare.starts_with('-'), places }
            }
            Place::Printed => Place::Printed,
        };
        before = Some(bare);
        if ends {
            place = Place::Command;
        }
    }
    let goes_on = line.trim_end().ends_with('\\');
    if goes_on { place } else { Place::Command }
}

fn is_name(word: &str) -> bool {
    !word.is_empty()
        && word.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
        && !word.as_bytes()[0].is_ascii_digit()
}

/// The words of a line up to a comment; what is in quotes is one word.
fn words(line: &str) -> impl Iterator<Item = &str> {
    let mut rest = line;
    std::iter::from_fn(move || {
        rest = rest.trim_start();
        if rest.is_empty() || rest.starts_with('#') {
            return None;
        }
        let mut quote = None;
        let end = rest.char_indices().find(|(_, c)| match (quote, c) {
            (Some(q), c) if *c == q => {
                quote = None;
                false
            }
            (Some(_), _) => false,
            (None, '"' | '\'') => {
                quote = Some(*c);
                false
            }
            (None, c) => c.is_whitespace(),
        });
        let (word, after) = rest.split_at(end.map_or(rest.len(), |(i, _)| i));
        rest = after;
        Some(word)
    })
}
