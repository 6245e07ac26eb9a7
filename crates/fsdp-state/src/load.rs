//! One state dict into the layout of another: what broadcast, distribute and reshard have in common.

use candle_core::Device;
use fsdp_comm::ProcessGroup;
use fsdp_flat::storage::{to_device, with_bytes};
use fsdp_flat::{LocalShard, ShardedTensor, dtype};
use fsdp_layout::{KeyPath, PlainTensor, PlainValue, TensorBox};
use serde::{Deserialize, Serialize};

use crate::gather::covered;
use crate::memory::{Buffer, ElementType, device_of, own_leaf};
use crate::schema::{Agreement, Leaf, Schema, Side, agree};
use crate::transfer::{Exchange, Item, Layout};
use crate::{
    IterateOptions, Keep, LoadReport, Mismatch, StateDict, StateError, StateValue, get_element_mut, iterate_state_dict,
};

/// Options of the functions that bring the values of one state dict into the layout of another.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// Whether names that only one of the two dicts has are an error. If not, values that are missing stay as they
    /// are, and unexpected ones are left out, without being moved; the report names both.
    pub strict: bool,
    /// Where tensors go; `None` puts each where the local tensor is (the CPU if this rank has none). May differ between
    /// ranks.
    pub device: Option<Device>,
}

impl Default for LoadOptions {
    /// Strict, on the devices of the local tensors.
    fn default() -> Self {
        LoadOptions { strict: true, device: None }
    }
}

/// Who has the values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// One rank.
    Root(usize),
    /// Every rank has all names, and together they have all elements.
    EveryRank,
}

/// What ranks tell each other of where their elements are.
#[derive(Debug, Serialize, Deserialize)]
struct Whereabouts {
    /// From the root: its schema, and its plain values and 0-dim tensors in order.
    root: Option<(Schema, Vec<Option<PlainValue>>)>,
    /// The boxes of the tensors that there are to take from, in the source's order.
    have: Vec<Vec<TensorBox>>,
    /// The boxes of the local tensors, in their order.
    want: Vec<Vec<TensorBox>>,
}

/// A state dict's leaves, sorted by path.
#[derive(Debug)]
struct Leaves<'a> {
    schema: Schema,
    values: Vec<&'a StateValue>,
}

impl<'a> Leaves<'a> {
    fn of(state: &'a StateDict) -> Result<Self, StateError> {
        let (schema, values) = Schema::with_values(state)?;
        Ok(Leaves { schema, values })
    }

    fn boxes(&self) -> Vec<Vec<TensorBox>> {
        self.values.iter().map(|value| boxes_of_value(value)).collect()
    }
}

/// What this rank brings.
#[derive(Debug)]
struct Brought<'a> {
    /// The dict whose layout is wanted.
    local: Leaves<'a>,
    /// The dict with the values, where this rank brings one.
    source: Option<Leaves<'a>>,
    /// The source's scalars, on the root.
    scalars: Vec<Option<PlainValue>>,
}

/// A name that both dicts have.
struct Pair<'a> {
    path: &'a KeyPath,
    leaf: &'a Leaf,
    source: usize,
    target: usize,
}

/// The values of `source` in the structure and layout of `local`.
pub(crate) fn load(
    operation: &'static str,
    group: &ProcessGroup,
    origin: Origin,
    source: Option<&StateDict>,
    local: &StateDict,
    options: &LoadOptions,
) -> Result<(StateDict, LoadReport), StateError> {
    let brought = bring(group, origin, source, local);
    let agreed = brought.map(|brought| (agreement(origin, &brought, options.strict), brought));
    let brought = agree(group, operation, agreed)?;
    let whereabouts = exchange_whereabouts(group, origin, &brought)?;
    let root = match origin {
        Origin::Root(root) => whereabouts.get(root).and_then(|whereabouts| whereabouts.root.as_ref()),
        Origin::EveryRank => None,
    };
    let own = brought.source.as_ref();
    let Some(schema) = root.map(|(schema, _)| schema).or(own.map(|own| &own.schema)) else {
        return Err(StateError::NoSource { rank: group.rank() });
    };
    let (report, pairs) = compare(schema, &brought.local.schema);
    if !report.mismatched.is_empty() || (options.strict && !report.is_clean()) {
        return Err(StateError::Incompatible { operation, report });
    }

    let (scalars, tensors): (Vec<Pair<'_>>, Vec<Pair<'_>>) =
        pairs.into_iter().partition(|pair| pair.leaf.is_scalar() && brought.local.schema.0[pair.target].1.is_scalar());
    let mut items = Vec::with_capacity(tensors.len());
    for pair in &tensors {
        let template = brought.local.values[pair.target];
        let (Some((dtype, shape)), Some(element)) = (pair.leaf.tensor(), ElementType::of(template)) else { continue };
        let own = own.and_then(|own| own.values.get(pair.source).copied());
        let (have, want) = boxes_of_ranks(group, &whereabouts, pair, own, template);
        let layout = Layout { shape: shape.to_vec(), element: dtype.size_in_bytes() as usize, have, want };
        items.push(Item { layout: covered(operation, group, pair.path, layout)?, source: own, element });
    }

    let mut exchange = Exchange::new(group, operation);
    let device_for = |template: &StateValue| options.device.clone().unwrap_or_else(|| device_of(template));
    let mut loaded: Vec<(&KeyPath, StateValue)> = Vec::with_capacity(scalars.len() + tensors.len());
    exchange.run_each(&items, |index, buffers| {
        let (path, template) = (tensors[index].path, brought.local.values[tensors[index].target]);
        loaded.push((path, assemble(template, buffers, &device_for(template))?));
        Ok(())
    })?;
    for pair in &scalars {
        let template = brought.local.values[pair.target];
        let value = exchange.attempt(|| match root {
            Some((_, scalars)) => {
                let scalar = scalars.get(pair.source).cloned().flatten().unwrap_or(PlainValue::None);
                scalar_value(pair.leaf, scalar, template, &device_for(template))
            }
            None => match own.and_then(|own| own.values.get(pair.source)) {
                Some(own) => own_leaf(own, Some(&device_for(template))),
                None => Ok(template.clone()),
            },
        });
        loaded.extend(value.map(|value| (pair.path, value)));
    }
    exchange.finish()?;

    let mut result = iterate_state_dict(local, &mut Keep, &IterateOptions::default())?;
    for (path, value) in loaded {
        if let Some(slot) = get_element_mut(&mut result, path) {
            *slot = value;
        }
    }
    Ok((result, report))
}

fn bring<'a>(
    group: &ProcessGroup,
    origin: Origin,
    source: Option<&'a StateDict>,
    local: &'a StateDict,
) -> Result<Brought<'a>, StateError> {
    let brings = match origin {
        Origin::Root(root) if root >= group.world_size() => {
            return Err(StateError::NoSuchRank { rank: root, world_size: group.world_size() });
        }
        Origin::Root(root) => root == group.rank(),
        Origin::EveryRank => true,
    };
    let source = match source.filter(|_| brings) {
        None if brings => return Err(StateError::NoSource { rank: group.rank() }),
        source => source.map(Leaves::of).transpose()?,
    };
    let local = Leaves::of(local)?;
    let scalars = match (&source, origin) {
        (Some(source), Origin::Root(_)) => {
            let leaves = source.schema.0.iter().zip(&source.values);
            leaves.map(|((_, leaf), value)| scalar_of(leaf, value)).collect::<Result<_, _>>()?
        }
        _ => Vec::new(),
    };
    Ok(Brought { local, source, scalars })
}

fn agreement(origin: Origin, brought: &Brought<'_>, strict: bool) -> Agreement {
    let from = match origin {
        Origin::Root(root) => format!("from rank {root}, "),
        Origin::EveryRank => String::new(),
    };
    let mut schemas = vec![brought.local.schema.clone()];
    if let (Origin::EveryRank, Some(source)) = (origin, &brought.source) {
        schemas.push(source.schema.clone());
    }
    Agreement { arguments: format!("{from}{}", if strict { "strict" } else { "not strict" }), schemas }
}

/// One object all-gather, if elements may have to move; else nothing, and every rank has what it wants.
fn exchange_whereabouts(
    group: &ProcessGroup,
    origin: Origin,
    brought: &Brought<'_>,
) -> Result<Vec<Whereabouts>, StateError> {
    let source = brought.source.as_ref();
    if origin == Origin::EveryRank && !source.is_some_and(|source| source.schema.has_sharded()) {
        return Ok(Vec::new());
    }
    let root = match origin {
        Origin::Root(_) => source.map(|source| (source.schema.clone(), brought.scalars.clone())),
        Origin::EveryRank => None,
    };
    let have = source.map(Leaves::boxes).unwrap_or_default();
    Ok(group.all_gather_object(&Whereabouts { root, have, want: brought.local.boxes() })?)
}

/// Each rank's boxes of the source and of the local tensor.
fn boxes_of_ranks(
    group: &ProcessGroup,
    whereabouts: &[Whereabouts],
    pair: &Pair<'_>,
    own: Option<&StateValue>,
    template: &StateValue,
) -> (Vec<Vec<TensorBox>>, Vec<Vec<TensorBox>>) {
    if whereabouts.is_empty() {
        // Every rank has all of it, and what other ranks want is their own business.
        let mut want = vec![Vec::new(); group.world_size()];
        want[group.rank()] = boxes_of_value(template);
        return (vec![own.map(boxes_of_value).unwrap_or_default(); group.world_size()], want);
    }
    let at = |boxes: &[Vec<TensorBox>], index: usize| boxes.get(index).cloned().unwrap_or_default();
    whereabouts.iter().map(|ranks| (at(&ranks.have, pair.source), at(&ranks.want, pair.target))).unzip()
}

fn boxes_of_value(value: &StateValue) -> Vec<TensorBox> {
    match value {
        StateValue::Tensor(tensor) => vec![TensorBox::whole(tensor.dims())],
        StateValue::Raw(tensor) => vec![TensorBox::whole(tensor.shape())],
        StateValue::Sharded(tensor) => tensor.boxes(),
        _ => Vec::new(),
    }
}

/// What fits, and what does not.
fn compare<'a>(source: &'a Schema, local: &'a Schema) -> (LoadReport, Vec<Pair<'a>>) {
    let mut report = LoadReport::default();
    let mut pairs = Vec::new();
    source.compare(local, |side| match side {
        Side::Left { path } => report.unexpected.push(path.flat_key()),
        Side::Right { path } => report.missing.push(path.flat_key()),
        Side::Both { path, left: (source, leaf), right: (target, current) } => {
            let both_scalar = leaf.is_scalar() && current.is_scalar();
            if both_scalar || (leaf.tensor().is_some() && leaf.tensor() == current.tensor()) {
                pairs.push(Pair { path, leaf, source, target });
            } else {
                let describe = |leaf: &Leaf| match leaf.tensor() {
                    Some((dtype, shape)) => format!("{dtype} {shape:?}"),
                    None => leaf.to_string(),
                };
                let (saved, current) = (describe(leaf), describe(current));
                report.mismatched.push(Mismatch { fqn: path.flat_key(), saved, current });
            }
        }
    });
    report.missing.sort();
    report.unexpected.sort();
    report.mismatched.sort();
    (report, pairs)
}

/// What arrived of a tensor, as the kind of tensor that the local one is.
fn assemble(template: &StateValue, buffers: Vec<Buffer>, device: &Device) -> Result<StateValue, StateError> {
    let StateValue::Sharded(template) = template else {
        let buffer = buffers.into_iter().next();
        return buffer.map_or_else(|| Ok(template.clone()), |buffer| buffer.into_value(device));
    };
    Ok(assemble_sharded(template.dtype(), template.shape(), template.boxes(), buffers, device)?.into())
}

/// Buffers, one for each box, as a sharded tensor.
pub(crate) fn assemble_sharded(
    dtype: candle_core::DType,
    shape: &[usize],
    boxes: Vec<TensorBox>,
    buffers: Vec<Buffer>,
    device: &Device,
) -> Result<ShardedTensor, StateError> {
    let mut shards = Vec::with_capacity(buffers.len());
    for (bounds, buffer) in boxes.into_iter().zip(buffers) {
        if let StateValue::Tensor(tensor) = buffer.into_value(device)? {
            shards.push(LocalShard { bounds, tensor });
        }
    }
    Ok(ShardedTensor::new(dtype, shape.to_vec(), shards)?)
}

/// A plain value or a whole 0-dim tensor by value; nothing for larger tensors.
fn scalar_of(leaf: &Leaf, value: &StateValue) -> Result<Option<PlainValue>, StateError> {
    let plain = |dtype, data| PlainValue::Tensor(PlainTensor { dtype, shape: Vec::new(), data });
    Ok(match (leaf, value) {
        (Leaf::Plain, StateValue::Plain(value)) => Some(value.clone()),
        (Leaf::Whole { dtype, shape }, StateValue::Tensor(tensor)) if shape.is_empty() => {
            let tensor = to_device(&tensor.detach(), &Device::Cpu)?.contiguous()?;
            Some(plain(*dtype, with_bytes(&tensor, <[u8]>::to_vec)?))
        }
        (Leaf::Whole { dtype, shape }, StateValue::Raw(tensor)) if shape.is_empty() => {
            Some(plain(*dtype, tensor.bytes().to_vec()))
        }
        _ => None,
    })
}

/// The value that [`scalar_of`] took.
fn scalar_value(
    leaf: &Leaf,
    value: PlainValue,
    template: &StateValue,
    device: &Device,
) -> Result<StateValue, StateError> {
    match (leaf, value) {
        (Leaf::Whole { .. }, PlainValue::Tensor(tensor)) => {
            let raw = ElementType::Raw(tensor.dtype);
            let element = match template {
                StateValue::Tensor(template) if dtype::of(template)? == tensor.dtype => {
                    ElementType::Candle(template.dtype())
                }
                StateValue::Raw(_) => raw,
                _ => dtype::to_candle(tensor.dtype).map_or(raw, ElementType::Candle),
            };
            let mut buffer = Buffer::zeros(element, &[])?;
            buffer.bytes_mut().copy_from_slice(&tensor.data);
            buffer.into_value(device)
        }
        (_, value) => Ok(value.into()),
    }
}
