//! Who writes: which machine, which process, so that the leavings of a dead one can be told from the work of a living.

use std::fs;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{SystemTime, UNIX_EPOCH};

/// A process, in a form that another process can judge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    /// The boot and the process namespace in which the number means something.
    machine: String,
    pid: u32,
    /// When it started, in the kernel's ticks: numbers are used again.
    start: u64,
}

static OWN: LazyLock<Owner> = LazyLock::new(|| {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = fs::read_link("/proc/self/ns/pid").map(|p| p.display().to_string()).unwrap_or_default();
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let all = format!("{} {namespace} {}", boot.trim(), name.trim());
    let machine = blake3::hash(all.as_bytes()).to_hex()[..12].to_owned();
    let pid = std::process::id();
    Owner { machine, pid, start: start_of(pid).unwrap_or(0) }
});

/// Field 22 of `/proc/PID/stat`; the command in field 2 may hold spaces.
fn start_of(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

impl Owner {
    /// This process.
    pub(crate) fn own() -> Owner {
        Owner { pid: std::process::id(), ..OWN.clone() }
    }

    /// Text without spaces, slashes or dots.
    pub(crate) fn text(&self) -> String {
        format!("{}-{}-{}", self.machine, self.pid, self.start)
    }

    pub(crate) fn parse(text: &str) -> Option<Owner> {
        let mut parts = text.split('-');
        let (machine, pid, start) = (parts.next()?, parts.next()?, parts.next()?);
        Some(Owner { machine: machine.to_owned(), pid: pid.parse().ok()?, start: start.parse().ok()? })
    }

    /// Whether it has certainly ended. A process of another machine or namespace cannot be judged.
    pub(crate) fn is_dead(&self) -> bool {
        self.machine == OWN.machine && start_of(self.pid) != Some(self.start)
    }
}

/// Text that no other call, process or machine makes.
pub(crate) fn nonce() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let all = format!("{} {} {now}", Owner::own().text(), COUNT.fetch_add(1, Relaxed));
    blake3::hash(all.as_bytes()).to_hex()[..16].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_process_lives_and_reads_back() {
        let own = Owner::own();
        assert_eq!(Owner::parse(&own.text()), Some(own.clone()));
        assert!(own.start > 0);
        assert!(!own.is_dead());
    }

    #[test]
    fn an_ended_process_is_dead_and_a_used_number_is_not_its() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let mut owner = Owner { pid: child.id(), start: start_of(child.id()).unwrap_or(1), ..Owner::own() };
        child.wait().unwrap();
        assert!(owner.is_dead());
        owner.pid = std::process::id();
        owner.start = 1;
        assert!(owner.is_dead());
    }

    #[test]
    fn a_process_of_another_machine_is_not_judged() {
        let elsewhere = Owner { machine: "elsewhere".into(), pid: u32::MAX, start: 1 };
        assert!(!elsewhere.is_dead());
    }
}
