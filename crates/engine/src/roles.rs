//! What the values of a device that is not there are for: parameters, what optimizers keep, batches from the host.
//!
//! Python names the tensors that it knows before and after each step of an optimizer; their values are told apart by
//! identity. What else goes into a program is told by where it came from and when.

use crate::value::{State, Value};
use oxitorch_capture::{Beside, Label, Role, TensorType};
use rustc_hash::FxHashMap;
use std::sync::{Arc, Weak};

/// Where a value came from.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Origin {
    /// The host, in this step.
    Host(u64),
    /// A program, in this step.
    Program(u64),
}

/// What is known of a value.
#[derive(Debug)]
struct Known {
    /// So that no other value has its address.
    _value: Weak<Value>,
    origin: Option<Origin>,
    /// As Python said it.
    label: Option<Label>,
}

impl Known {
    /// What it is for in a step.
    fn label(&self, step: u64) -> Label {
        match (&self.label, self.origin) {
            (Some(label), _) => label.clone(),
            (None, Some(Origin::Host(at))) if at == step => Role::Data.into(),
            (None, Some(Origin::Program(at))) if at == step => Role::Intermediate.into(),
            _ => Role::Other.into(),
        }
    }
}

/// What is known of all values.
#[derive(Debug, Default)]
pub(crate) struct Roles {
    known: FxHashMap<usize, Known>,
}

/// What went into a launch and came out of it.
#[derive(Debug, Default)]
pub(crate) struct Ends {
    pub(crate) step: u64,
    /// None: a number that goes along.
    inputs: Vec<Option<Weak<Value>>>,
    outputs: Vec<Weak<Value>>,
}

impl Ends {
    /// Of a launch, before its inputs are given away.
    pub(crate) fn new(inputs: &[Arc<Value>], outputs: &[Arc<Value>]) -> Ends {
        let of = |v: &Arc<Value>| {
            let is_number = matches!(*v.state.lock(), State::Host(_));
            (!is_number).then(|| Arc::downgrade(v))
        };
        Ends {
            step: 0,
            inputs: inputs.iter().map(of).collect(),
            outputs: outputs.iter().map(Arc::downgrade).collect(),
        }
    }
}

impl Roles {
    fn of(&mut self, value: &Arc<Value>) -> &mut Known {
        let new = || Known { _value: Arc::downgrade(value), origin: None, label: None };
        self.known.entry(Arc::as_ptr(value) as usize).or_insert_with(new)
    }

    /// A value came from the host.
    pub(crate) fn uploaded(&mut self, value: &Arc<Value>, step: u64) {
        self.of(value).origin = Some(Origin::Host(step));
    }

    /// A launch made values.
    pub(crate) fn made(&mut self, values: &[Arc<Value>], step: u64) {
        values.iter().for_each(|v| self.of(v).origin = Some(Origin::Program(step)));
    }

    /// Says what a value is for. The first label counts.
    pub(crate) fn label(&mut self, value: &Arc<Value>, role: Role, name: &str) {
        let label = || Label { role, name: Some(name.to_owned()) };
        self.of(value).label.get_or_insert_with(label);
    }

    /// Values that are alive in a step and none of these.
    pub(crate) fn beside(&self, inputs: &[Arc<Value>], step: u64) -> Vec<Beside> {
        let is_input = |at: usize| inputs.iter().any(|v| Arc::as_ptr(v) as usize == at);
        let mut all: Vec<(&Known, Arc<Value>)> = Vec::new();
        for (&at, known) in &self.known {
            let Some(value) = known._value.upgrade() else { continue };
            // Who reads a value holds its lock while it waits for the one of all this.
            let is_there = value.state.try_lock().is_none_or(|s| matches!(*s, State::Absent(_)));
            // What was offloaded is not on the device.
            if is_there && value.charge.is_held() && !is_input(at) {
                all.push((known, value));
            }
        }
        let order = |(known, value): &(&Known, Arc<Value>)| {
            let label = known.label.as_ref().map(|l| (l.name.clone(), l.role.name()));
            (label, value.ty.shape.to_vec())
        };
        all.sort_by_cached_key(order);
        let one = |(known, value): &(&Known, Arc<Value>)| Beside {
            label: known.label(step),
            shape: TensorType::from(&value.ty).shape,
            bytes: value.bytes(),
        };
        all.iter().map(one).collect()
    }

    fn label_of(&self, value: Option<&Weak<Value>>, step: u64) -> Label {
        let Some(value) = value else { return Role::Number.into() };
        let known = self.known.get(&(value.as_ptr() as usize));
        known.map_or_else(Label::default, |known| known.label(step))
    }

    /// What the inputs and the outputs are for.
    pub(crate) fn of_ends(&self, ends: &Ends) -> (Vec<Label>, Vec<Label>) {
        let inputs = ends.inputs.iter().map(|v| self.label_of(v.as_ref(), ends.step)).collect();
        let outputs = ends.outputs.iter().map(|v| self.label_of(Some(v), ends.step)).collect();
        (inputs, outputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;
    use oxitorch_hlo::{DType, TensorType as HloType};

    /// One that takes memory of the device.
    fn value() -> Arc<Value> {
        let value = Value::new(HloType::new(DType::F32, [2].as_slice()), State::Absent(None));
        Memory::new(100).charge(value.bytes(), &value.charge);
        value
    }

    #[test]
    fn roles_are_labels_or_come_from_where_and_when() {
        let mut roles = Roles::default();
        let (weight, batch, old, made, new) = (value(), value(), value(), value(), value());
        let number = Value::scalar(DType::F64, &[0; 8]);
        roles.uploaded(&weight, 0);
        roles.uploaded(&old, 0);
        roles.uploaded(&batch, 1);
        roles.made(&[made.clone(), new.clone()], 1);
        let inputs = [weight.clone(), batch.clone(), old.clone(), made, number];
        let ends = Ends { step: 1, ..Ends::new(&inputs, std::slice::from_ref(&new)) };
        // A label may come after the launch, and the value be gone by then.
        roles.label(&weight, Role::Parameter, "w");
        roles.label(&weight, Role::Gradient, "w");
        drop((batch, weight, inputs));
        roles.label(&new, Role::State, "w/exp_avg");
        let (inputs, outputs) = roles.of_ends(&ends);
        let found: Vec<_> = inputs.iter().map(|label| label.role).collect();
        assert_eq!(found, [Role::Parameter, Role::Data, Role::Other, Role::Intermediate, Role::Number]);
        let state = Label { role: Role::State, name: Some("w/exp_avg".into()) };
        assert_eq!(outputs, std::slice::from_ref(&state));
        let one = |label: Label| [Beside { label, shape: vec![2], bytes: 8 }];
        let beside = roles.beside(std::slice::from_ref(&old), 1);
        assert_eq!(beside, one(state));
        let beside = |step| roles.beside(std::slice::from_ref(&new), step);
        assert_eq!(beside(1), one(Role::Other.into()));
        assert_eq!(beside(0), one(Role::Data.into()));
    }
}
