//! Several processes with one client: their places, and torch's store as that by which their plugins find each other.

use oxitorch_engine::Numbered;
use oxitorch_pjrt::{self as pjrt, Code, KeyValueStore, StoreError};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a process knows of its place when it joins the others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// The number of this process, and how many there are.
    pub(crate) index: usize,
    pub(crate) count: usize,
    /// The devices of its machine.
    pub(crate) numbered: Numbered,
    /// The driver's number of its GPU.
    pub(crate) gpu: i64,
}

static PLACE: Mutex<Option<Place>> = Mutex::new(None);
/// The store of the default process group; another one when that is made anew.
static STORE: Mutex<Option<Py<PyAny>>> = Mutex::new(None);

/// This process is one of several that meet in this store. Its first place stays, as a device starts once.
pub(crate) fn meet(place: Place, store: Py<PyAny>) {
    *STORE.lock() = Some(store);
    PLACE.lock().get_or_insert(place);
}

/// This process's place, if it has joined others.
pub(crate) fn place() -> Option<Place> {
    PLACE.lock().filter(|place| place.count > 1)
}

/// What the plugin is told of it.
pub(crate) fn for_client(place: Place) -> pjrt::Processes {
    pjrt::Processes { index: place.index, count: place.count, store: Arc::new(TorchStore) }
}

/// The store of the default process group.
struct TorchStore;

/// A wait asks again after so long, at most.
const POLL: Duration = Duration::from_millis(50);

impl KeyValueStore for TorchStore {
    /// It asks again and again: who waits inside of a store keeps others of this process from it.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, StoreError> {
        let (start, mut pause) = (Instant::now(), Duration::from_millis(1));
        loop {
            if let Some(value) = self.try_get(key)? {
                return Ok(value);
            }
            if start.elapsed() >= timeout {
                let words = format!("no process has put `{key}` within {} s", timeout.as_secs_f64());
                return Err(StoreError::new(Code::DEADLINE_EXCEEDED, words));
            }
            std::thread::sleep(pause);
            pause = POLL.min(2 * pause);
        }
    }

    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        ask(|store| {
            let key = full(key);
            if !store.call_method1("check", (vec![&key],))?.extract::<bool>()? {
                return Ok(None);
            }
            Ok(Some(store.call_method1("get", (key,))?.extract::<Vec<u8>>()?))
        })
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        ask(|store| store.call_method1("set", (full(key), PyBytes::new(store.py(), value))).map(drop))
    }
}

/// The plugin's keys are beside those of torch.
fn full(key: &str) -> String {
    format!("oxitorch/pjrt/{key}")
}

/// Asks the store, from any thread.
fn ask<T>(f: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>) -> Result<T, StoreError> {
    let gone = |words: &str| StoreError::new(Code::UNAVAILABLE, words);
    // None: the interpreter is ending.
    let asked = Python::try_attach(|py| {
        let store = STORE.lock().as_ref().map(|store| store.clone_ref(py));
        let store = store.ok_or_else(|| gone("no process group has a store"))?;
        f(store.bind(py)).map_err(|e| gone(&format!("the store of torch.distributed: {e}")))
    });
    asked.unwrap_or_else(|| Err(gone("Python is ending, and with it the store of torch.distributed")))
}
