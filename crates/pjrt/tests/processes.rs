//! One client across processes, with real processes: how they meet, whose devices are whose, and programs of all of them.
//! The plugin is XLA's for the CPU with what makes it one of several processes around it.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{cpu_plugin_path, get, put};
use oxitorch_pjrt::{
    Client, ClientOptions, Code, CompileOptions, Error, Executable, KeyValueStore, Platform, Plugin,
    Processes, Program, StoreError,
};
use oxitorch_testkit::multi_process_plugin::{Config, table};
use oxitorch_testkit::processes::{FolderStore, Process, all_pass, run};

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

fn plugin(devices: usize, patience_ms: u64) -> &'static Plugin {
    let cpu_plugin = cpu_plugin_path();
    let table = table(Config { cpu_plugin, devices, patience: Duration::from_millis(patience_ms) }).unwrap();
    // SAFETY: the table honours the headers and lives for ever.
    unsafe { Plugin::from_api(Platform::Cuda, table, Path::new("processes")) }.unwrap()
}

fn started(
    devices: usize,
    patience_ms: u64,
    index: usize,
    count: usize,
    store: Arc<dyn KeyValueStore>,
) -> oxitorch_pjrt::Result<Arc<Client>> {
    let processes = Some(Processes { index, count, store });
    Client::new(plugin(devices, patience_ms), &ClientOptions { processes, ..Default::default() })
}

fn keys(process: &Process) -> Arc<Keys> {
    Arc::new(Keys(FolderStore::new(&process.folder)))
}

/// A client of a test whose processes all come.
fn client(process: &Process, devices: usize) -> Arc<Client> {
    started(devices, 20_000, process.index, process.count, keys(process)).unwrap()
}

fn message(e: oxitorch_pjrt::Result<Arc<Client>>) -> String {
    e.unwrap_err().to_string()
}

/// A sum over all replicas.
fn sum(client: &Arc<Client>, ids: &[i32]) -> oxitorch_pjrt::Result<Executable> {
    let group: Vec<String> = (0..ids.len()).map(|i| i.to_string()).collect();
    let text = format!(
        "module {{ func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {{
  %0 = \"stablehlo.all_reduce\"(%x) ({{
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
  }}) {{replica_groups = dense<[[{}]]> : tensor<1x{}xi64>}} : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32> }} }}",
        group.join(", "),
        ids.len()
    );
    let options = CompileOptions { replicas: ids.len(), device_ids: ids.to_vec(), ..Default::default() };
    client.compile(&Program::mlir(text.as_bytes()), &options)
}

fn run_sum(client: &Arc<Client>, program: &Executable) -> Vec<Vec<f32>> {
    let values = |id: i32| [id as f32 + 1.0, 10.0 * (id as f32 + 1.0)];
    let own: Vec<_> = program.devices().map(|d| put(client, d.index(), &values(d.id()), &[2])).collect();
    let lists: Vec<Vec<_>> = own.iter().map(|b| vec![b]).collect();
    let lists: Vec<&[_]> = lists.iter().map(Vec::as_slice).collect();
    let (results, events) = program.execute_sharded_with_events(&lists, &[]).unwrap();
    events.iter().for_each(|e| e.wait().unwrap());
    results.iter().map(|r| get(&r[0])).collect()
}

#[test]
fn a_client_has_the_devices_of_all_processes() {
    all_pass("a_client_has_the_devices_of_all_processes", 2, |process| {
        let client = client(process, 2);
        assert_eq!(client.process_index(), process.index as i32);
        assert_eq!(client.device_ids(), [0, 1, 2, 3]);
        let own: Vec<(i32, i32)> =
            client.devices().iter().map(|d| (d.id(), d.description().process_index)).collect();
        let (first, at) = (2 * process.index as i32, process.index as i32);
        assert_eq!(own, [(first, at), (first + 1, at)]);
        // What is of this process alone needs nobody else.
        let alone = sum(&client, &[first + 1]).unwrap();
        assert_eq!(run_sum(&client, &alone), [[first as f32 + 2.0, 10.0 * (first as f32 + 2.0)]]);
    });
}

#[test]
fn programs_of_devices_of_several_processes_compute_together() {
    all_pass("programs_of_devices_of_several_processes_compute_together", 4, |process| {
        let client = client(process, 1);
        let all = sum(&client, &[0, 1, 2, 3]).unwrap();
        assert_eq!(all.devices().len(), 1);
        for _ in 0..3 {
            assert_eq!(run_sum(&client, &all), [[10.0, 100.0]]);
        }
        // A half, and the devices that are left, in another order.
        let group = [[0, 2], [3, 1]][process.index % 2];
        let part = sum(&client, &group).unwrap();
        let total = [4.0, 6.0][process.index % 2];
        assert_eq!(run_sum(&client, &part), [[total, 10.0 * total]]);
        let options = CompileOptions { replicas: 2, device_ids: group.to_vec(), ..Default::default() };
        let again = client.deserialize(&part.serialize().unwrap(), &options).unwrap();
        assert_eq!(run_sum(&client, &again), [[total, 10.0 * total]]);
        // What one process has compiled for its device, the others load for theirs.
        let first = keys(process);
        if process.index == 0 {
            first.put("alone", &sum(&client, &[0]).unwrap().serialize().unwrap()).unwrap();
        }
        let bytes = first.get("alone", Duration::from_secs(20)).unwrap();
        let alone = client.deserialize(&bytes, &CompileOptions::default()).unwrap();
        let own = process.index as f32 + 1.0;
        assert_eq!(run_sum(&client, &alone), [[own, 10.0 * own]]);
        let foreign = sum(&client, &[(process.index as i32 + 1) % 4]).unwrap_err();
        assert!(foreign.to_string().contains("is of this process"), "{foreign}");
    });
}

#[test]
fn a_process_that_is_late_is_waited_for() {
    all_pass("a_process_that_is_late_is_waited_for", 2, |process| {
        std::thread::sleep(Duration::from_millis(400 * process.index as u64));
        assert_eq!(client(process, 1).device_ids().len(), 2);
    });
}

#[test]
fn a_process_that_does_not_come_is_an_error_in_time() {
    all_pass("a_process_that_does_not_come_is_an_error_in_time", 1, |process| {
        let start = Instant::now();
        let e = message(started(1, 300, 0, 2, keys(process)));
        assert!(e.contains("DEADLINE_EXCEEDED") && e.contains("nobody has put `client/1`"), "{e}");
        assert!(start.elapsed() < Duration::from_secs(10));
    });
}

#[test]
fn processes_that_count_differently_are_told() {
    all_pass("processes_that_count_differently_are_told", 2, |process| {
        let e = message(started(1, 5_000, process.index, 2 + process.index, keys(process)));
        assert!(e.contains("counts"), "{e}");
    });
}

#[test]
fn a_missing_participant_and_another_program_are_errors_of_the_launch() {
    all_pass("a_missing_participant_and_another_program_are_errors_of_the_launch", 2, |process| {
        let client = started(1, 1_500, process.index, 2, keys(process)).unwrap();
        let x = put(&client, 0, &[1.0, 2.0], &[2]);
        let ids: &[i32] = if process.index == 0 { &[0, 1] } else { &[1, 0] };
        if process.index == 0 {
            let late = sum(&client, ids).unwrap().execute_sharded(&[&[&x]], &[]).unwrap_err();
            assert_eq!(late.code(), Some(Code::DEADLINE_EXCEEDED), "{late}");
        }
        keys(process).put(&format!("met {}", process.index), b"").unwrap();
        keys(process).get(&format!("met {}", 1 - process.index), Duration::from_secs(20)).unwrap();
        let text = |op: &str| {
            format!(
                "module {{ func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {{
  %0 = stablehlo.{op} %x : tensor<2xf32>
  return %0 : tensor<2xf32> }} }}"
            )
        };
        let text = text(["negate", "abs"][process.index]);
        let options = CompileOptions { replicas: 2, device_ids: vec![1, 0], ..Default::default() };
        let program = client.compile(&Program::mlir(text.as_bytes()), &options).unwrap();
        let e = program.execute_sharded(&[&[&x]], &[]).unwrap_err();
        assert!(e.to_string().contains("different programs"), "{e}");
    });
}

/// A store that fails in its own way.
struct Broken(fn() -> StoreError);

impl KeyValueStore for Broken {
    fn get(&self, _: &str, _: Duration) -> Result<Vec<u8>, StoreError> {
        Err(self.0())
    }

    fn try_get(&self, _: &str) -> Result<Option<Vec<u8>>, StoreError> {
        Err(self.0())
    }

    fn put(&self, _: &str, _: &[u8]) -> Result<(), StoreError> {
        Ok(())
    }
}

#[test]
fn what_a_store_says_reaches_who_starts_the_client() {
    all_pass("what_a_store_says_reaches_who_starts_the_client", 1, |_| {
        let gone = || StoreError::new(Code::UNAVAILABLE, "the store is gone");
        let e = message(started(1, 100, 0, 2, Arc::new(Broken(gone))));
        assert!(e.contains("UNAVAILABLE") && e.contains("the store is gone"), "{e}");
        let e = message(started(1, 100, 0, 2, Arc::new(Broken(|| panic!("on purpose")))));
        assert!(e.contains("INTERNAL") && e.contains("the store panicked at `client/0`"), "{e}");
        // The store goes with the client, not before.
        let store: Arc<dyn KeyValueStore> = Arc::new(Broken(gone));
        let client = started(1, 100, 0, 1, store.clone()).unwrap();
        assert_eq!(Arc::strong_count(&store), 2);
        drop(client);
        assert_eq!(Arc::strong_count(&store), 1);
    });
}

#[test]
fn places_that_cannot_be_are_refused() {
    for (index, count) in [(2, 2), (0, 0), (0, usize::MAX)] {
        let store = Arc::new(Broken(|| unreachable!()));
        let e = message(started(1, 100, index, count, store));
        assert!(e.contains("cannot be that of process"), "{e}");
    }
    let store = Arc::new(Broken(|| unreachable!()));
    let processes = Some(Processes { index: 0, count: 2, store });
    let e = Client::new(common::plugin(), &ClientOptions { processes, ..Default::default() });
    assert!(matches!(e, Err(Error::InvalidArgument { .. })), "{e:?}");
}

#[test]
fn a_process_that_fails_is_seen() {
    let ended = run("a_process_that_fails_is_seen", 2, |process| assert_eq!(process.index, 0, "the second"));
    assert_eq!(ended.iter().map(|e| e.passed).collect::<Vec<_>>(), [true, false]);
    assert!(ended[1].printed.contains("the second"), "{}", ended[1].printed);
}
