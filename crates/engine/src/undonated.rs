//! Inputs whose memory a program did not get for its results, though nobody used them afterwards.
//!
//! That is known of programs on a device that is not there, where somebody watches what becomes of each value.

use crate::executor::Launch;
use crate::program::Program;
use crate::site::{Site, describe};
use crate::value::Value;
use oxitorch_capture::UndonatedReason as Reason;
use oxitorch_hlo::TensorType;
use rustc_hash::FxHashMap;
use std::sync::{Arc, Weak};

/// Smaller inputs are not worth a word.
const LEAST: u64 = 4096;

/// An input that was not overwritten.
#[derive(Debug)]
struct Input {
    program: Arc<Program>,
    number: usize,
    ty: TensorType,
    site: Site,
    step: u64,
    reason: Reason,
}

/// What becomes of inputs that were not overwritten.
#[derive(Debug, Default)]
pub(crate) struct Undonated {
    /// Nobody can use these any more.
    dead: Vec<Input>,
    /// Somebody could still use these, by address. The pointers keep the addresses from being given away.
    held: FxHashMap<usize, (Weak<Value>, Vec<Input>)>,
}

impl Undonated {
    /// A program is launched in this step; its inputs have these sizes on the device.
    pub(crate) fn launched(&mut self, launch: &Launch, sizes: &[u64], step: u64) {
        launch.inputs.iter().for_each(|v| self.used(v));
        let mut wanting: FxHashMap<u64, usize> = FxHashMap::default();
        launch.outputs.iter().for_each(|o| *wanting.entry(o.bytes()).or_default() += 1);
        for &i in &launch.program.donated {
            if let Some(n) = wanting.get_mut(&launch.inputs[i as usize].bytes()) {
                *n = n.saturating_sub(1);
            }
        }
        for (number, (value, &size)) in launch.inputs.iter().zip(sizes).enumerate() {
            let given = launch.program.donated.contains(&(number as u32));
            if given || size < LEAST {
                continue;
            }
            let input = |reason| Input {
                program: launch.program.clone(),
                number,
                ty: value.ty.clone(),
                site: value.site,
                step,
                reason,
            };
            if !value.is_visible() {
                self.dead.push(input(Reason::Size));
            } else if wanting.get(&size).is_some_and(|n| *n > 0) {
                let held = self.held.entry(address(value));
                held.or_insert_with(|| (Arc::downgrade(value), Vec::new())).1.push(input(Reason::Held));
            }
        }
    }

    /// Somebody uses a value.
    pub(crate) fn used(&mut self, value: &Arc<Value>) {
        self.held.remove(&address(value));
    }

    /// The inputs of this program in a step. What is still held counts after a step without a use of it.
    pub(crate) fn of(&self, program: &Arc<Program>, steps: u64) -> Vec<oxitorch_capture::Undonated> {
        let last = steps.saturating_sub(1);
        let dead = self.dead.iter().filter(|i| i.step == last);
        let held = self.held.values().flat_map(|(value, inputs)| {
            let gone = value.strong_count() == 0;
            inputs.iter().filter(move |i| i.step + 1 == last || (gone && i.step == last))
        });
        let mut found: Vec<&Input> = dead.chain(held).filter(|i| Arc::ptr_eq(&i.program, program)).collect();
        found.sort_by_key(|i| (i.number, i.step));
        found.dedup_by_key(|i| i.number);
        found.into_iter().map(Input::told).collect()
    }
}

impl Input {
    fn told(&self) -> oxitorch_capture::Undonated {
        oxitorch_capture::Undonated {
            input: self.number,
            r#type: (&self.ty).into(),
            bytes: self.ty.bytes().max(0) as u64,
            line: describe(self.site),
            reason: self.reason,
        }
    }
}

fn address(value: &Arc<Value>) -> usize {
    Arc::as_ptr(value) as usize
}
