//! Opening the plugin and its client.

use crate::gil::warn;
use crate::processes;
use crate::setup::Setup;
use oxitorch_engine::Error;
use oxitorch_pjrt as pjrt;
use pjrt::{Patience, Start, StartError, THREADS};
use pyo3::prelude::*;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// The plugin that was asked for, or the best one that has hardware.
pub(crate) fn chosen(setup: &Setup) -> Result<pjrt::Found, Error> {
    let options = pjrt::DiscoverOptions { python_paths: setup.site_dirs.clone(), ..Default::default() };
    let found = pjrt::discover(&options);
    pjrt::choose(&found, setup.platform, pjrt::hardware_present).cloned().map_err(failed)
}

/// How many threads the cpu platform is to have in this process; `None`: as many as the plugin thinks, or as the environment
/// says.
pub(crate) fn threads(setup: &Setup) -> Option<usize> {
    let told = std::env::var_os(THREADS).is_some();
    if told { None } else { pjrt::threads_of_one(setup.processes.load(Relaxed)) }
}

/// Sets the variable as Python does, and takes it away again: processes that this one starts are not to have it.
fn tell_threads(threads: Option<usize>) -> PyResult<()> {
    crate::gil::with(|py| {
        let environ = py.import("os")?.getattr("environ")?;
        match threads {
            Some(n) => environ.set_item(THREADS, n.to_string()),
            None => environ.call_method1("pop", (THREADS, py.None())).map(drop),
        }
    })
}

/// Opens a client that computes with so many threads.
fn with_threads(
    threads: Option<usize>,
    begin: impl FnOnce() -> pjrt::Result<Arc<pjrt::Client>>,
) -> Result<Arc<pjrt::Client>, Error> {
    let said = |e: PyErr| Error::runtime(format!("cannot say in {THREADS} how many threads there are: {e}"));
    if threads.is_none() {
        return begin().map_err(failed);
    }
    tell_threads(threads).map_err(said)?;
    let client = begin().map_err(failed);
    tell_threads(None).map_err(said)?;
    client
}

fn failed(e: pjrt::Error) -> Error {
    Error::runtime(e.to_string())
}

/// A client of that plugin. With how many threads the cpu platform computes; None: as the plugin thinks.
pub(crate) fn open(
    setup: &Setup,
    threads: Option<usize>,
    interrupt: impl Fn() -> Result<(), Error>,
) -> Result<Arc<pjrt::Client>, Error> {
    let chosen = chosen(setup)?;
    let place = processes::place().filter(|_| chosen.platform != pjrt::Platform::Cpu);
    let load = pjrt::LoadOptions::for_platform(chosen.platform, false);
    let cpu_devices = (chosen.platform == pjrt::Platform::Cpu).then(|| setup.cpu_devices.unwrap_or(1));
    let mut extra = if chosen.platform == pjrt::Platform::Cuda { setup.cuda.clone() } else { Vec::new() };
    if let (pjrt::Platform::Cuda, Some(place)) = (chosen.platform, place) {
        take_one_gpu(&mut extra, place.gpu);
    }
    let processes = place.map(processes::for_client);
    let options = pjrt::ClientOptions { cpu_devices, extra, processes };
    let (platform, path) = (chosen.platform, chosen.path);
    let keep = setup.memory_caching && platform == pjrt::Platform::Cpu;
    let begin = move || {
        let plugin = pjrt::Plugin::load(platform, &path, &load)?;
        if keep {
            plugin.keep_blocks();
        }
        pjrt::Client::new(plugin, &options)
    };
    if platform != pjrt::Platform::Tpu && place.is_none() {
        return with_threads(threads.filter(|_| platform == pjrt::Platform::Cpu), begin);
    }
    // A TPU of several hosts, and a client of several processes, begin when all of them are there. Plugins wait without a
    // word.
    static STARTING: Start<pjrt::Result<Arc<pjrt::Client>>> = Start::new();
    let patience = Patience { tell: TELL, limit: Duration::from_secs(setup.start_timeout), poll: POLL };
    let told = || warn(&format!("the device is not ready after {} s\n{}", TELL.as_secs(), waits_for(setup)));
    let client = STARTING.run(&patience, begin, told, interrupt).map_err(|e| match e {
        StartError::Interrupted(e) => e,
        StartError::Failed(message) => Error::runtime(message),
    })?;
    let late = || {
        let limit = setup.start_timeout;
        let hint = "hint: the same program has to run on every host; OXITORCH_START_TIMEOUT sets the seconds to wait";
        Error::runtime(format!("the device did not start within {limit} s\n{}\n{hint}", waits_for(setup)))
    };
    client.ok_or_else(late)?.map_err(failed)
}

/// How many devices there are, where plugin and kernel say it. Starts nothing: launchers of processes ask, and a TPU belongs
/// to the process that starts it.
pub(crate) fn count(setup: &Setup) -> Option<usize> {
    let platform = chosen(setup).ok()?.platform;
    let asked = setup.cuda.iter().find_map(|(name, value)| match value {
        pjrt::NamedValue::Ints(ids) if name == "visible_devices" => Some(ids.len()),
        _ => None,
    });
    let few = match platform {
        pjrt::Platform::Cpu => return Some(cpu_devices(setup)),
        pjrt::Platform::Tpu => setup.visible.0,
        pjrt::Platform::Cuda => asked.or(setup.visible.1),
    };
    // One device for each process, or `init_process_group()`, which asks, would find that each has started them for itself.
    let shared = Some(setup.processes.load(Relaxed)).filter(|&n| n > 1);
    let all = pjrt::devices_present(platform).or(shared)?;
    Some(few.map_or(all, |few| few.min(all))).filter(|&n| n > 0)
}

/// The error about a device that is not among so many, which are not started.
pub(crate) fn no_device(setup: &Setup, index: usize, count: usize) -> Error {
    let e = Error::no_device(index, count);
    let is_cpu = chosen(setup).is_ok_and(|found| found.platform == pjrt::Platform::Cpu);
    if !is_cpu || setup.cpu_devices.is_some() {
        return e;
    }
    Error::runtime(format!(
        "{e}\nhint: the cpu platform shows a device for each process that LOCAL_WORLD_SIZE counts; where no launcher sets \
         it, call torch.distributed.init_process_group() first, or set OXITORCH_CPU_DEVICES"
    ))
}

/// How many devices the cpu platform shows: one for each process of the machine, as far as is known. A script that starts
/// its processes itself lets the one of rank n choose device n before they meet, so the child of number n + 1 has as many.
pub(crate) fn cpu_devices(setup: &Setup) -> usize {
    setup.cpu_devices.unwrap_or_else(|| setup.processes.load(Relaxed).max(child(setup)))
}

/// Asked each time: a process of `multiprocessing` knows what it is after it has imported the script.
fn child(setup: &Setup) -> usize {
    let Some(ask) = &setup.child else { return 0 };
    let number = crate::gil::with(|py| {
        let asked = ask.call0(py).and_then(|number| number.extract::<usize>(py));
        asked.unwrap_or_else(|e| {
            e.write_unraisable(py, None);
            0
        })
    });
    number.min(MOST_CHILDREN)
}

/// A child of a higher number is no rank: the parent starts one process after another. Each device has threads.
const MOST_CHILDREN: usize = 64;

/// Of the GPUs that the user names, or else that the driver has, a process among others takes its own.
fn take_one_gpu(options: &mut Vec<(String, pjrt::NamedValue)>, number: i64) {
    const NAME: &str = "visible_devices";
    let named = options.iter().find(|(name, _)| name == NAME).map(|(_, value)| value.clone());
    let gpu = match named {
        Some(pjrt::NamedValue::Ints(named)) => named.get(number as usize).or(named.first()).copied(),
        _ => None,
    };
    options.retain(|(name, _)| name != NAME);
    options.push((NAME.to_owned(), pjrt::NamedValue::Ints(vec![gpu.unwrap_or(number)])));
}

/// After this time it is said what is waited for.
const TELL: Duration = Duration::from_secs(30);
/// How often signals are looked at.
const POLL: Duration = Duration::from_millis(100);

fn waits_for(setup: &Setup) -> String {
    if let Some(place) = processes::place() {
        let (index, count) = (place.index, place.count);
        return format!("it waits for all {count} processes of torch.distributed; this is number {index}");
    }
    match setup.tpu_hosts.as_slice() {
        [] => {
            "libtpu is starting it; another process may hold it (`oxitorch doctor` looks for one)".to_owned()
        }
        hosts => format!("it waits for all of its hosts: {}", hosts.join("; ")),
    }
}
