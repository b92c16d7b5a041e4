//! Tasks of process groups: what they read and write, what goes on beside them, and what happens when they fail. On XLA's
//! CPU plugin, in whose memory they run, and on the fake plugin, whose memory they cannot see.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use common::cpu_plugin::client;
use common::{MUL_, Rig, Tensor, options, wrapped};
use oxitorch_engine::{About, ArgRef, Group, Mode, Reason, Site, Target, Task, TaskTarget, Work};
use oxitorch_hlo::DType;
use oxitorch_pjrt::Platform;
use oxitorch_testkit::fake_plugin::FakePlugin;

mod common;

const F32: DType = DType::F32;

fn rig() -> Rig {
    Rig::of(FakePlugin::new(), Target::Client(client(1)), &options())
}

/// A device whose memory the host does not see.
fn apart() -> Rig {
    Rig::on(FakePlugin::new(), Platform::Tpu)
}

type Run = Box<dyn FnMut(&[&[u8]], &mut [&mut [u8]]) -> Result<(), String> + Send>;

struct Runs(Run, u64);

impl Task for Runs {
    fn about(&self) -> About {
        About { name: "all_reduce", group: Group::new("0".into(), Box::default()).into(), number: self.1 }
    }

    fn begin(&mut self, number: u64) {
        self.1 = number;
    }

    fn again(&self) -> Option<Box<dyn Task>> {
        None
    }

    fn run(&mut self, reads: &[&[u8]], writes: &mut [&mut [u8]], _: Site) -> Result<(), String> {
        (self.0)(reads, writes)
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn put(bytes: &mut [u8], numbers: impl IntoIterator<Item = f32>) {
    for (to, number) in bytes.as_chunks_mut().0.iter_mut().zip(numbers) {
        *to = number.to_le_bytes();
    }
}

/// Adds one to each element.
fn add_one(bytes: &mut [u8]) {
    let old = floats(bytes);
    put(bytes, old.into_iter().map(|x| x + 1.0));
}

trait Tasks {
    fn record(
        &self,
        lane: u64,
        reads: &[&Tensor],
        in_place: &[&Tensor],
        fresh: &[&Tensor],
        run: impl FnMut(&[&[u8]], &mut [&mut [u8]]) -> Result<(), String> + Send + 'static,
    ) -> Arc<Work>;
    fn numbers(&self, tensor: &Tensor) -> Vec<f32>;
    fn tensor(&self, numbers: &[f32]) -> Tensor;
}

impl Tasks for Rig {
    fn record(
        &self,
        lane: u64,
        reads: &[&Tensor],
        in_place: &[&Tensor],
        fresh: &[&Tensor],
        run: impl FnMut(&[&[u8]], &mut [&mut [u8]]) -> Result<(), String> + Send + 'static,
    ) -> Arc<Work> {
        let reads: Vec<_> = reads.iter().map(|t| t.by_ref()).collect();
        let kept = in_place.iter().map(|t| TaskTarget { tensor: t.by_ref(), in_place: true });
        let fresh = fresh.iter().map(|t| TaskTarget { tensor: t.by_ref(), in_place: false });
        let writes: Vec<_> = kept.chain(fresh).collect();
        let mode = self.engine.switches().mode;
        let task = Box::new(Runs(Box::new(run), 0));
        self.stream().task(task, lane, &reads, &writes, self.site(), mode).unwrap()
    }

    fn numbers(&self, tensor: &Tensor) -> Vec<f32> {
        floats(&self.read(tensor).unwrap())
    }

    fn tensor(&self, numbers: &[f32]) -> Tensor {
        let tensor = Tensor::new(F32, &[numbers.len() as i64]);
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        self.stream().write_host(&tensor.by_ref(), &bytes, self.site(), Mode::Fused).unwrap();
        tensor
    }
}

/// Something that a task waits for, and the other end.
fn gate() -> (Sender<()>, Receiver<()>) {
    channel()
}

/// Waits for what another thread does soon.
const SOON: Duration = Duration::from_secs(20);

#[test]
fn a_task_has_its_place_among_the_ops() {
    for make in [rig, apart] {
        let rig = make();
        for mode in [Mode::Fused, Mode::Strict, Mode::Debug] {
            rig.mode(mode);
            let x = rig.tensor(&[1.0, -2.0, 3.0]);
            let (seen, reads) = channel();
            let out = Tensor::new(F32, &[2, 3]);
            rig.record(1, &[&x], &[], &[&out], move |reads, writes| {
                let read = floats(reads[0]);
                put(writes[0], read.iter().chain(&read).copied());
                seen.send(read).unwrap();
                Ok(())
            });
            rig.record(1, &[], &[&out], &[], |_, writes| {
                add_one(writes[0]);
                Ok(())
            });
            assert_eq!(rig.numbers(&out), [2.0, -1.0, 4.0, 2.0, -1.0, 4.0]);
            assert_eq!(rig.numbers(&x), [1.0, -2.0, 3.0]);
            assert_eq!(reads.recv(), Ok(vec![1.0, -2.0, 3.0]));
        }
    }
}

#[test]
fn who_is_told_of_a_window_is_told_which_collective_ended_it() {
    let rig = rig();
    let (x, own) = (rig.tensor(&[1.0, 2.0]), rig.tensor(&[3.0, 4.0, 5.0]));
    let cases: [(&[&Tensor], &[&Tensor], &str); 3] = [
        (&[], &[&own], "all_reduce(float32[3])"),
        (&[&x], &[&own, &x], "all_reduce(float32[3], float32[2])"),
        (&[&x], &[], "all_reduce(float32[2])"), // a rank that only sends
    ];
    for (line, (reads, writes, call)) in (1..).zip(cases) {
        // Another program each time.
        let shape = rig.uploaded(F32, &[line], 1);
        let y = rig.at(line as u32).neg(&shape);
        rig.record(1, reads, writes, &[], |_, _| Ok(()));
        drop(y);
        let which = format!("{call}, number 1 of group 0");
        let told = rig.engine.explanations().pop().unwrap();
        let words = format!("\n  launched because of a collective: {which}, at script.py:{line}");
        assert!(told.contains(&words), "{told}");
        let graph = rig.engine.graphs(0).pop().unwrap();
        assert_eq!((graph.ended_by, graph.ended_by_collective), (Some(Reason::Collective), Some(which)));
    }
}

#[test]
fn a_note_of_collectives_is_behind_them_and_no_other() {
    let rig = rig();
    let stream = rig.stream();
    let x = rig.tensor(&[1.0, 2.0]);
    let (open, gate) = gate();
    rig.record(1, &[], &[&x], &[], move |_, _| gate.recv_timeout(SOON).map_err(|e| e.to_string()));
    let alone = stream.note(rig.site());
    let y = rig.neg(&x); // is not launched
    let collectives = stream.note_collectives();
    stream.wait(&alone).unwrap();
    assert!(alone.time().is_some() && collectives.time().is_none());
    open.send(()).unwrap();
    stream.wait(&collectives).unwrap();
    assert!(collectives.time() > alone.time());
    drop(y);
}

#[test]
fn it_writes_a_part_of_a_storage() {
    let rig = rig();
    let x = rig.tensor(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let column = x.view(&[3], &[2], 1);
    rig.record(1, &[&column], &[&column], &[], |reads, writes| {
        assert_eq!(floats(reads[0]), [2.0, 4.0, 6.0]);
        add_one(writes[0]);
        Ok(())
    });
    assert_eq!(rig.numbers(&x), [1.0, 3.0, 3.0, 5.0, 5.0, 7.0]);
}

#[test]
fn it_takes_what_ops_before_it_computed_and_gives_it_to_those_behind() {
    let rig = rig();
    let x = rig.tensor(&[1.0, -2.0, 3.0]);
    let y = rig.neg(&x);
    rig.record(1, &[], &[&y], &[], |_, writes| {
        add_one(writes[0]);
        Ok(())
    });
    let z = rig.neg(&y);
    assert_eq!(rig.flushes(|| assert_eq!(rig.numbers(&z), [0.0, -3.0, 2.0]))["read"], 1);
    assert_eq!((rig.numbers(&x), rig.numbers(&y)), (vec![1.0, -2.0, 3.0], vec![0.0, 3.0, -2.0]));
}

#[test]
fn it_writes_in_place_what_nobody_else_sees() {
    let rig = rig();
    let x = rig.tensor(&[1.0; 64]);
    let places = |rig: &Rig| {
        let (said, places) = channel();
        let write = move |_: &[&[u8]], writes: &mut [&mut [u8]]| {
            add_one(writes[0]);
            said.send(writes[0].as_ptr() as usize).map_err(|e| e.to_string())
        };
        rig.record(1, &[], &[&x], &[], write);
        rig.sync().unwrap();
        places.recv().unwrap()
    };
    let (first, second) = (places(&rig), places(&rig));
    assert_eq!(first, second);
    let other = rig.neg(&x); // is launched before the task, and wants the value no more
    assert_eq!(places(&rig), first);
    assert_eq!(rig.numbers(&other), [-3.0; 64]);
    assert_eq!(rig.numbers(&x), [4.0; 64]);
    assert_eq!(rig.bytes(), 512);
}

#[test]
fn a_lane_keeps_its_order_over_the_devices_of_an_engine() {
    let rig = Rig::of(FakePlugin::new(), Target::Client(client(2)), &options());
    let x = rig.tensor(&[1.0; 4]);
    let ((go, wait), (said, order)) = (gate(), channel());
    // The first device is busy, so the lane's first task is late.
    rig.record(2, &[], &[&x], &[], move |_, _| wait.recv().map_err(|e| e.to_string()));
    let says = |n: u32| {
        let said = said.clone();
        move |_: &[&[u8]], _: &mut [&mut [u8]]| said.send(n).map_err(|e| e.to_string())
    };
    rig.record(1, &[&x], &[], &[], says(1));
    let (second, on_second) = (rig.engine.stream(1).unwrap(), rig.engine.switches().mode);
    let task = Box::new(Runs(Box::new(says(2)), 0));
    second.task(task, 1, &[], &[], rig.site(), on_second).unwrap();
    assert!(order.recv_timeout(Duration::from_millis(50)).is_err());
    go.send(()).unwrap();
    assert_eq!((order.recv_timeout(SOON), order.recv_timeout(SOON)), (Ok(1), Ok(2)));
    rig.sync().unwrap();
}

#[test]
fn ops_go_on_beside_it_unless_they_need_its_result() {
    let rig = rig();
    let (x, y) = (rig.tensor(&[1.0; 4]), rig.tensor(&[2.0; 4]));
    let (go, wait) = gate();
    let work = rig.record(1, &[], &[&x], &[], move |_, writes| {
        wait.recv().unwrap();
        add_one(writes[0]);
        Ok(())
    });
    assert_eq!(rig.numbers(&rig.neg(&y)), [-2.0; 4]);
    assert!(work.outcome().is_none());
    let z = rig.neg(&x);
    go.send(()).unwrap();
    assert_eq!(rig.numbers(&z), [-2.0; 4]);
    assert!(matches!(work.outcome(), Some(Ok(()))));
}

#[test]
fn what_it_reads_stays_while_it_does() {
    let rig = rig();
    let x = rig.tensor(&[1.0; 4]);
    let (go, wait) = gate();
    let (said, seen) = channel();
    rig.record(1, &[&x], &[], &[], move |reads, _| {
        wait.recv().unwrap();
        said.send(floats(reads[0])).unwrap();
        Ok(())
    });
    let three = 3f64.to_le_bytes();
    rig.dispatch(MUL_, &[x.arg(), ArgRef::Tensor(wrapped(&three))]).unwrap();
    rig.record(2, &[], &[&x], &[], |_, writes| {
        add_one(writes[0]);
        Ok(())
    });
    let late = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        go.send(()).unwrap();
    });
    assert_eq!(rig.numbers(&x), [4.0; 4]);
    assert_eq!(seen.recv_timeout(SOON), Ok(vec![1.0; 4]));
    late.join().unwrap();
}

#[test]
fn lanes_keep_their_order_and_wait_for_no_other() {
    let rig = rig();
    let tensors: Vec<Tensor> = (0..3).map(|_| rig.tensor(&[0.0])).collect();
    let (go, wait) = gate();
    let order = Arc::new(AtomicUsize::new(0));
    let next = |order: &Arc<AtomicUsize>| {
        let order = order.clone();
        move |writes: &mut [&mut [u8]]| put(writes[0], [order.fetch_add(1, SeqCst) as f32])
    };
    let (one, two, three) = (next(&order), next(&order), next(&order));
    rig.record(1, &[], &[], &[&tensors[0]], move |_, writes| {
        wait.recv().unwrap();
        one(writes);
        Ok(())
    });
    rig.record(1, &[], &[], &[&tensors[1]], move |_, writes| {
        two(writes);
        Ok(())
    });
    rig.record(2, &[], &[], &[&tensors[2]], move |_, writes| {
        three(writes);
        Ok(())
    });
    assert_eq!(rig.numbers(&tensors[2]), [0.0]);
    go.send(()).unwrap();
    assert_eq!((rig.numbers(&tensors[0]), rig.numbers(&tensors[1])), (vec![1.0], vec![2.0]));
}

#[test]
fn a_failure_is_that_of_the_values_it_writes_and_of_the_next_wait() {
    for make in [rig, apart] {
        let rig = make();
        let (x, y) = (rig.tensor(&[1.0; 4]), rig.tensor(&[2.0; 4]));
        let work = rig.at(7).record(1, &[&y], &[&x], &[], |_, _| Err("no peer".into()));
        let z = rig.neg(&x);
        let e = rig.read(&z).unwrap_err();
        assert_eq!(e.message.lines().next(), Some("no peer"));
        assert!(rig.read(&x).is_err());
        assert!(matches!(work.outcome(), Some(Err(e)) if e.message.starts_with("no peer")));
        assert_eq!(rig.read(&y).unwrap().len(), 16);
        let ran = Arc::new(AtomicUsize::new(0));
        let count = ran.clone();
        let next = rig.record(1, &[&x], &[], &[], move |_, _| {
            count.fetch_add(1, SeqCst);
            Ok(())
        });
        let _ = rig.sync();
        assert_eq!(ran.load(SeqCst), 0, "an input is missing");
        assert!(matches!(next.outcome(), Some(Err(e)) if e.message.starts_with("no peer")));
        rig.record(1, &[], &[], &[&y], |_, _| Err("not again".into()));
        assert!(rig.sync().unwrap_err().message.starts_with("not again"));
        assert!(rig.sync().is_ok());
    }
}

#[test]
fn a_panic_is_a_failure() {
    let rig = rig();
    let x = rig.tensor(&[1.0; 4]);
    rig.record(1, &[], &[&x], &[], |_, _| panic!("in a test"));
    assert!(rig.read(&x).unwrap_err().message.contains("panicked"));
}

#[test]
fn tensors_without_elements_have_no_memory() {
    let rig = rig();
    let none = Tensor::new(F32, &[0, 3]);
    let work = rig.record(1, &[&none], &[&none], &[&none], |reads, writes| {
        assert_eq!((reads[0].len(), writes[0].len(), writes[1].len()), (0, 0, 0));
        Ok(())
    });
    rig.sync().unwrap();
    assert!(matches!(work.outcome(), Some(Ok(()))));
}

#[test]
fn an_engine_that_ends_waits_for_no_task() {
    let (go, wait) = gate();
    let (began, begun) = gate();
    {
        let rig = rig();
        let x = rig.tensor(&[1.0; 4]);
        rig.record(1, &[], &[&x], &[], move |_, writes| {
            began.send(()).unwrap();
            let _ = wait.recv();
            add_one(writes[0]);
            Ok(())
        });
        begun.recv_timeout(SOON).unwrap();
        let _ = rig.neg(&x);
        rig.engine.close();
    }
    go.send(()).unwrap();
}

#[test]
fn metrics_count_them_and_who_waits() {
    for make in [rig, apart] {
        let rig = make();
        let x = rig.tensor(&[1.0, 2.0, 3.0]);
        let out = Tensor::new(F32, &[2, 3]);
        rig.record(1, &[&x], &[], &[&out], |reads, writes| {
            std::thread::sleep(Duration::from_millis(30));
            let twice = [floats(reads[0]), floats(reads[0])].concat();
            put(writes[0], twice);
            Ok(())
        });
        assert_eq!(rig.numbers(&out), [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]);
        let failed = rig.record(1, &[], &[&out], &[], |_, _| Err("no".into()));
        rig.stream().wait_for(&failed, None).unwrap().unwrap().unwrap_err();
        let all = rig.engine.metrics().collectives();
        let of = all["all_reduce"];
        assert_eq!((all.len(), of.count, of.bytes), (1, 2, 48));
        assert!(of.time >= Duration::from_millis(30) && of.waited >= Duration::from_millis(15), "{of:?}");
    }
}
