//! What processes of a machine can have only one of: compiling a program, building the shim, the chips, ports.

use std::path::Path;

use oxitorch_cache::{Folder, Sharing, listing};
use oxitorch_pjrt::{Platform, hardware_present};

use crate::facts::Facts;
use crate::machine;
use crate::report::Check;
use oxitorch_format::many;

const SECTION: &str = "Locks and ports";

/// Ports that are used without being asked for, by whom, and the variable that moves it.
const PORTS: [(u16, &str, &str); 3] = [
    (8431, "libtpu's metrics", "TPU_RUNTIME_METRICS_PORTS"),
    (8471, "TPU processes among themselves", "TPU_PROCESS_PORT"),
    (29500, "torchrun's rendezvous", "MASTER_PORT"),
];

pub(super) fn section(facts: &Facts) -> Vec<Check> {
    let tpu = hardware_present(Platform::Tpu);
    let mut checks = vec![programs(facts), shim(&facts.cache_dir)];
    checks.extend(tpu.then(chips));
    checks.push(ports(tpu));
    checks
}

/// Programs that some process is compiling while others may wait for it.
fn programs(facts: &Facts) -> Check {
    const NAME: &str = "programs";
    let store = Folder::of_programs(&facts.cache_dir, Sharing::Machine);
    if store.check().is_err() {
        return Check::warn(SECTION, NAME, "not looked at: others can write to the cache folder");
    }
    match listing::leases(&store) {
        Ok(l) => {
            let mut text = match l.held {
                0 => "none is being compiled".to_owned(),
                n => format!("{} being compiled", many(n, "program")),
            };
            if l.dead > 0 {
                text += &format!(", {} of processes that have ended", many(l.dead, "lease"));
            }
            Check::ok(SECTION, NAME, text)
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            Check::ok(SECTION, NAME, "none is being compiled")
        }
        Err(e) => Check::warn(SECTION, NAME, format!("the leases cannot be read: {e}")),
    }
}

/// Whether the shim is being built.
fn shim(cache: &Path) -> Check {
    match machine::lock_holder(&cache.join("shim").join(".lock")) {
        Some(pid) => Check::ok(SECTION, "shim", format!("process {pid} builds it; others wait for it")),
        None => Check::ok(SECTION, "shim", "free"),
    }
}

fn chips() -> Check {
    let chips = machine::tpu_files();
    let text = if chips.is_empty() { "no device files seen".into() } else { chips.join(" ") };
    match machine::lock_holder(Path::new(machine::TPU_LOCK)) {
        Some(pid) => Check::warn(SECTION, "tpu lock", format!("{text}; process {pid} holds the chips"))
            .hint("one process at a time can use a TPU: end that one first"),
        None => Check::ok(SECTION, "tpu lock", format!("{text}; free")),
    }
}

/// A taken port is in the way of the next process that wants it, if this machine has TPUs.
fn ports(tpu: bool) -> Check {
    const NAME: &str = "ports";
    let taken = machine::listening();
    let (used, free): (Vec<_>, Vec<_>) = PORTS.iter().partition(|(port, ..)| taken.contains(port));
    let names = |ports: &[&(u16, &str, &str)]| {
        let each = ports.iter().map(|(port, whose, _)| format!("{port} ({whose})"));
        each.collect::<Vec<_>>().join(", ")
    };
    if used.is_empty() {
        return Check::ok(SECTION, NAME, format!("free: {}", names(&free)));
    }
    let text = format!("in use: {}", names(&used));
    if !tpu {
        return Check::ok(SECTION, NAME, text);
    }
    let variables: Vec<&str> = used.iter().map(|(.., variable)| *variable).collect();
    Check::warn(SECTION, NAME, text)
        .hint(format!("if a process does not start because of that, set {}", variables.join(" or ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Status;

    #[test]
    fn a_taken_port_is_in_the_way_where_there_are_tpus() {
        // One of them is taken from here on, by this test or by somebody else.
        let _server = std::net::TcpListener::bind(("127.0.0.1", PORTS[2].0));
        let (with, without) = (ports(true), ports(false));
        assert_eq!((with.status, without.status), (Status::Warn, Status::Ok));
        assert!(without.found.contains("29500 (torchrun's rendezvous)"), "{}", without.found);
        assert!(with.hint.is_some_and(|h| h.contains("MASTER_PORT")));
    }

    #[test]
    fn nobody_builds_in_an_empty_folder() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(shim(folder.path()).found, "free");
    }
}
