//! What a FlatParameter, or a parameter, makes of its saved state; or why it cannot.

use std::collections::BTreeSet;

use candle_core::DType as CandleDType;
use fsdp_flat::dtype;
use fsdp_layout::DType;
use indexmap::IndexMap;

use super::OptimStateError;
use super::processed::{ProcessedState, ProcessedValue, is_like_parameter};
use crate::Result;
use crate::algorithm::Initial;
use crate::optimizer::{LocalParam, Optimizer};

/// One state entry of a local parameter that is being loaded.
#[derive(Debug, Clone)]
pub(crate) enum Planned {
    /// A piece of tensors shaped like the parameters; zeros for those parameters that have none.
    Piece(CandleDType),
    /// A tensor of another shape, whole on every rank.
    Whole,
    /// A small value.
    Scalar(ProcessedValue),
}

/// The entries of a local parameter by name.
pub(crate) type Plan = IndexMap<String, Planned>;

/// What goes into each of the optimizer's parameters, by position.
pub(crate) type Plans = Vec<Option<Plan>>;

/// The plan of a local parameter; `None` if nothing was saved for it.
pub(crate) fn plan(optimizer: &Optimizer, local: &LocalParam, saved: &ProcessedState) -> Result<Option<Plan>> {
    let fqns = local.fqns();
    let states: Vec<Option<&IndexMap<String, ProcessedValue>>> =
        fqns.iter().map(|fqn| saved.get(fqn).filter(|state| !state.is_empty())).collect();
    let Some(first) = states.iter().flatten().next() else { return Ok(None) };
    let names: BTreeSet<&String> = first.keys().collect();
    if states.iter().flatten().any(|state| state.keys().collect::<BTreeSet<_>>() != names) {
        let names = states.iter().map(|state| state.map_or_else(Vec::new, |state| state.keys().cloned().collect()));
        return Err(OptimStateError::DifferingNames { fqns, names: names.collect() }.into());
    }
    let mut plan = Plan::new();
    for name in names {
        let values: Vec<Option<&ProcessedValue>> =
            states.iter().map(|state| state.and_then(|state| state.get(name))).collect();
        plan.insert(name.clone(), planned(optimizer, local, &fqns, name, &values)?);
    }
    if let Some(fqn) = fqns.first() {
        for entry in optimizer.state_schema(fqn) {
            if entry.initial != Initial::FirstGradient && !plan.contains_key(entry.name) {
                let (fqn, name) = (fqn.clone(), entry.name.to_owned());
                return Err(OptimStateError::MissingEntry { fqn, name }.into());
            }
        }
    }
    Ok(Some(plan))
}

fn planned(
    optimizer: &Optimizer,
    local: &LocalParam,
    fqns: &[String],
    name: &str,
    values: &[Option<&ProcessedValue>],
) -> Result<Planned> {
    let types: BTreeSet<String> = values.iter().flatten().map(|value| value.type_name()).collect();
    let is_like = fqns.first().is_some_and(|fqn| is_like_parameter(optimizer, fqn, name));
    let first = values.iter().copied().flatten().next();
    let tensor_expected = is_like && !matches!(first, Some(ProcessedValue::PosDim { .. }));
    if types.len() != 1 || tensor_expected {
        let type_of = |value: &Option<&ProcessedValue>| value.map_or("None".to_owned(), ProcessedValue::type_name);
        return Err(OptimStateError::DifferingTypes {
            name: name.to_owned(),
            types: values.iter().map(type_of).collect(),
            fqns: fqns.to_vec(),
        }
        .into());
    }
    match first {
        Some(ProcessedValue::PosDim { .. }) => tensors(local, fqns, name, values, is_like),
        Some(value) if values.iter().all(|other| other.is_some_and(|other| other.same(value))) => {
            Ok(Planned::Scalar(value.clone()))
        }
        _ => {
            let describe = |value: &Option<&ProcessedValue>| value.map_or("None".to_owned(), ProcessedValue::describe);
            let mut dtypes = BTreeSet::new();
            for value in values.iter().flatten() {
                if let ProcessedValue::ZeroDim(tensor) = value {
                    dtypes.insert(tensor.dtype.to_string());
                }
            }
            Err(OptimStateError::DifferingScalars {
                name: name.to_owned(),
                values: values.iter().map(describe).collect(),
                dtypes: dtypes.into_iter().collect(),
                fqns: fqns.to_vec(),
            }
            .into())
        }
    }
}

/// An entry that is a tensor for every parameter that has it.
fn tensors(
    local: &LocalParam,
    fqns: &[String],
    name: &str,
    values: &[Option<&ProcessedValue>],
    is_like: bool,
) -> Result<Planned> {
    let layout = local.handle.layout();
    let shapes: Vec<&Vec<usize>> = local.params().into_iter().map(|param| &layout.shapes()[param]).collect();
    let mut dtypes: BTreeSet<DType> = BTreeSet::new();
    let mut wrong = None;
    for ((fqn, &expected), value) in fqns.iter().zip(&shapes).zip(values) {
        let Some(ProcessedValue::PosDim { dtype, shape }) = value else { continue };
        dtypes.insert(*dtype);
        if shape != expected && wrong.is_none() {
            wrong = Some((fqn, shape, expected));
        }
    }
    // A tensor of a shape of its own is one of the whole FlatParameter, so all its parameters have the same.
    let shared = values.iter().all(|value| value.is_some() && value == &values[0]);
    if wrong.is_some() && !is_like && shared {
        return Ok(Planned::Whole);
    }
    if dtypes.len() > 1 {
        return Err(OptimStateError::DifferingDTypes {
            name: name.to_owned(),
            dtypes: dtypes.iter().map(DType::to_string).collect(),
            fqns: fqns.to_vec(),
        }
        .into());
    }
    if let Some((fqn, found, expected)) = wrong {
        return Err(OptimStateError::WrongShape {
            fqn: fqn.clone(),
            name: name.to_owned(),
            found: found.clone(),
            expected: expected.clone(),
        }
        .into());
    }
    let absent_scalar =
        fqns.iter().zip(&shapes).zip(values).find(|((_, shape), value)| value.is_none() && shape.is_empty());
    if let Some(((fqn, _), _)) = absent_scalar {
        return Err(OptimStateError::ZeroDimParameter { fqn: fqn.clone(), name: name.to_owned() }.into());
    }
    let found = dtypes.first().copied().unwrap_or(DType::F32);
    if is_like && dtype::from_candle(local.handle.dtype()) != Some(found) {
        return Err(OptimStateError::WrongDType {
            fqn: fqns.first().cloned().unwrap_or_default(),
            name: name.to_owned(),
            found: found.to_string(),
            expected: dtype::from_candle(local.handle.dtype()).map_or_else(String::new, |dtype| dtype.to_string()),
        }
        .into());
    }
    Ok(Planned::Piece(dtype::to_candle(found)?))
}

/// Refuses state of some of a unit's trained parameters without that of others.
pub(crate) fn check_presence(optimizer: &Optimizer, saved: &ProcessedState) -> Result<()> {
    let parameters = optimizer.parameters();
    for handle in &parameters.handles {
        let layout = handle.layout();
        let has_state = |fqn: &str| saved.get(fqn).is_some_and(|state| !state.is_empty());
        let Some(other) = handle.params.iter().find(|param| has_state(&param.fqn)) else { continue };
        let lacks = handle.params.iter().zip(layout.numels()).find(|(param, numel)| {
            // What begins with the first gradient is rightly missing where there was none.
            let schema = optimizer.state_schema(&param.fqn);
            let is_stateful = schema.iter().any(|entry| entry.initial != Initial::FirstGradient);
            param.requires_grad && **numel > 0 && is_stateful && !has_state(&param.fqn)
        });
        if let Some((param, _)) = lacks {
            let (fqn, other) = (param.fqn.clone(), other.fqn.clone());
            return Err(OptimStateError::MissingState { fqn, other }.into());
        }
    }
    Ok(())
}
