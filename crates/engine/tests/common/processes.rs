//! Engines of several processes, whose devices are those of one client.

use std::sync::Arc;
use std::time::Duration;

use oxitorch_engine::{About, Collective, Error, Site, Target, Task, Work};
use oxitorch_pjrt::{Client, ClientOptions, Code, KeyValueStore, Platform, Plugin, Processes, StoreError};
use oxitorch_testkit::fake_plugin::FakePlugin;
use oxitorch_testkit::multi_process_plugin::{Config, table};
use oxitorch_testkit::processes::{FolderStore, Process};

use super::cpu_plugin::cpu_plugin_path;
use super::{Rig, Tensor, error, options};

/// How long processes wait for each other.
const PATIENCE: Duration = Duration::from_secs(30);

struct Keys(FolderStore);

impl KeyValueStore for Keys {
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, StoreError> {
        let late = || StoreError::new(Code::DEADLINE_EXCEEDED, format!("nobody has put `{key}`"));
        self.0.get(key, timeout).ok_or_else(late)
    }

    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        Ok(self.0.try_get(key))
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        self.0.put(key, value).map_err(|e| StoreError::new(Code::UNAVAILABLE, e.to_string()))
    }
}

/// The engine of one process, which has one device.
pub(crate) struct Member {
    pub(crate) rig: Rig,
    pub(crate) process: Process,
    pub(crate) store: FolderStore,
}

impl Member {
    pub(crate) fn new(process: &Process) -> Member {
        let store = FolderStore::new(&process.folder);
        let config = Config { cpu_plugin: cpu_plugin_path(), devices: 1, patience: PATIENCE };
        // SAFETY: the table honours the headers and lives for ever.
        let plugin =
            unsafe { Plugin::from_api(Platform::Cuda, table(config).unwrap(), "processes".as_ref()) };
        let place =
            Processes { index: process.index, count: process.count, store: Arc::new(Keys(store.clone())) };
        let client =
            Client::new(plugin.unwrap(), &ClientOptions { processes: Some(place), ..Default::default() });
        let rig = Rig::of(FakePlugin::new(), Target::Client(client.unwrap()), &options());
        Member { rig, process: process.clone(), store }
    }

    /// The own number.
    pub(crate) fn index(&self) -> usize {
        self.process.index
    }

    /// All devices as one group.
    pub(crate) fn all(&self) -> Vec<Vec<i32>> {
        vec![(0..self.process.count as i32).collect()]
    }

    /// Records a collective; `words` are what the members compare.
    pub(crate) fn collective(
        &self,
        what: &Collective,
        groups: &[Vec<i32>],
        x: &Tensor,
        out: &Tensor,
        words: &str,
    ) -> Result<Arc<Work>, Error> {
        let members = groups.iter().find(|g| g.contains(&(self.index() as i32))).cloned().unwrap_or_default();
        let task = Compare {
            store: self.store.clone(),
            own: self.index() as i32,
            members,
            key: format!("{}/{groups:?}", self.rig.line.get()),
            words: words.to_owned(),
        };
        let (site, mode) = (self.rig.site(), self.rig.engine.switches().mode);
        let stream = self.rig.stream();
        let task = (Box::new(task) as Box<dyn Task>, 1);
        stream.collective_into(what, groups, &x.by_ref(), &out.by_ref(), task, site, mode).map_err(error)
    }

    /// Waits until all have come here.
    pub(crate) fn meet(&self, place: &str) {
        self.store.put(&format!("{place} {}", self.index()), b"").unwrap();
        for other in 0..self.process.count {
            self.store.get(&format!("{place} {other}"), PATIENCE).unwrap();
        }
    }
}

/// Says what this process is about to do, and looks what the others say.
struct Compare {
    store: FolderStore,
    own: i32,
    members: Vec<i32>,
    key: String,
    words: String,
}

impl Compare {
    fn compare(&self, words: &str) -> Result<(), String> {
        let key = |of: i32| format!("said/{}/{of}", self.key);
        self.store.put(&key(self.own), words.as_bytes()).map_err(|e| e.to_string())?;
        for &other in &self.members {
            let said =
                self.store.get(&key(other), PATIENCE).ok_or(format!("process {other} says nothing"))?;
            let said = String::from_utf8_lossy(&said).into_owned();
            if said != words {
                return Err(format!("process {other} is about {said}, this one about {words}"));
            }
        }
        Ok(())
    }
}

impl Task for Compare {
    fn about(&self) -> About {
        About { name: "compare", ..About::default() }
    }

    fn begin(&mut self, _: u64) {}

    fn again(&self) -> Option<Box<dyn Task>> {
        None
    }

    fn run(&mut self, _: &[&[u8]], _: &mut [&mut [u8]], _: Site) -> Result<(), String> {
        self.compare(&self.words)
    }

    fn decline(&mut self, why: &str, _: Site) {
        let _ = self.compare(&format!("nothing: {why}")); // what the others say is no news
    }
}
