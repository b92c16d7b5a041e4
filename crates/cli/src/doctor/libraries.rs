//! Libraries that choose a device themselves: what they will choose, and what changes it.

use crate::facts::Facts;
use crate::packages::Packages;
use crate::report::Check;
use oxitorch_pjrt::{Platform, hardware_present};

const S: &str = "Libraries";
/// Accelerate's own setting; nothing that a program says is stronger.
const ACCELERATE: &str = "ACCELERATE_TORCH_DEVICE";
const AUTOLOAD: &str = "TORCH_DEVICE_BACKEND_AUTOLOAD";

/// A row of what oxitorch adapts.
struct Library {
    /// Its packages; the first that is installed counts.
    packages: &'static [&'static str],
    /// What chooses a device.
    chooser: &'static str,
    /// How a program says that it wants the CPU.
    cpu: &'static str,
    /// What it does with the device that [`ACCELERATE`] names, if it depends on that.
    set: Option<&'static str>,
}

const LIBRARIES: [Library; 3] = [
    Library {
        packages: &["accelerate"],
        chooser: "`Accelerator()`",
        cpu: "`Accelerator(cpu=True)`",
        set: Some("`Accelerator()` uses"),
    },
    Library {
        packages: &["transformers"],
        chooser: "`Trainer`",
        cpu: "`TrainingArguments(use_cpu=True)`",
        set: Some("`Trainer` fails: it has the model on tpu and the batches on"),
    },
    Library {
        packages: &["lightning", "pytorch-lightning"],
        chooser: "`Trainer(accelerator=\"auto\")`",
        cpu: "`accelerator=\"cpu\"`",
        set: None,
    },
];

/// Nothing where none of them is installed.
pub(super) fn section(facts: &Facts, packages: &Packages) -> Vec<Check> {
    // They find a GPU that PyTorch drives itself, and take it.
    let has_cuda = facts.torch.as_ref().is_some_and(|t| t.version.contains("+cu"));
    let cuda = has_cuda && hardware_present(Platform::Cuda);
    let variable = |name: &str| {
        let found = facts.env_foreign.iter().find(|f| f.name == name);
        found.and_then(|f| f.value.as_deref()).filter(|v| !v.is_empty())
    };
    let installed = |l: &Library| l.packages.iter().find_map(|name| packages.get(name));
    let found = LIBRARIES.iter().filter_map(|l| Some((l, installed(l)?)));
    found
        .map(|(library, package)| {
            let set = library.set.and_then(|words| Some((words, variable(ACCELERATE)?)));
            let check = if cuda && set.is_none() {
                on_cuda(library, &package.name)
            } else {
                check(library, &package.name, set, variable(AUTOLOAD) == Some("0"))
            };
            Check { found: format!("{}: {}", package.version, check.found), ..check }
        })
        .collect()
}

/// What it will choose where PyTorch has CUDA and a GPU is here.
fn on_cuda(Library { chooser, .. }: &Library, name: &str) -> Check {
    Check::ok(S, name, format!("{chooser} uses CUDA, which this PyTorch has"))
}

/// What a library will choose, given what it does with which device that is set, and whether `import torch` leaves
/// oxitorch out.
fn check(library: &Library, name: &str, set: Option<(&str, &str)>, left_out: bool) -> Check {
    let Library { chooser, cpu, .. } = library;
    match set {
        Some((words, device)) if !device.starts_with("tpu") => {
            let text = format!("{words} {device}, because {ACCELERATE} says so");
            Check::warn(S, name, text)
                .hint(format!("unset {ACCELERATE}; a program that wants the CPU says {cpu}"))
        }
        _ if left_out => {
            let text = format!("{chooser} uses the CPU, as `import torch` does not load oxitorch");
            Check::warn(S, name, text).hint(format!("unset {AUTOLOAD}, or say `import oxitorch` first"))
        }
        _ => Check::ok(S, name, format!("{chooser} uses tpu, {cpu} the CPU")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Status;

    #[test]
    fn what_is_chosen() {
        let told = |set, left_out| {
            let set = LIBRARIES[0].set.zip(set);
            let check = check(&LIBRARIES[0], "accelerate", set, left_out);
            (check.status, check.found, check.hint.unwrap_or_default())
        };
        let fine =
            (Status::Ok, "`Accelerator()` uses tpu, `Accelerator(cpu=True)` the CPU".into(), String::new());
        assert_eq!(told(None, false), fine);
        assert_eq!(
            on_cuda(&LIBRARIES[1], "transformers").found,
            "`Trainer` uses CUDA, which this PyTorch has"
        );
        assert_eq!(told(Some("tpu:0"), false), fine);
        let (status, text, hint) = told(Some("cpu"), false);
        assert!(
            status == Status::Warn && text.contains("uses cpu, because") && hint.starts_with("unset ACC")
        );
        let (status, text, hint) = told(None, true);
        assert!(
            status == Status::Warn && text.contains("uses the CPU") && hint.contains("`import oxitorch`")
        );
    }
}
