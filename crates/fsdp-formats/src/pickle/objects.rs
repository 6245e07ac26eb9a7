//! The opcodes that apply a class or function. Nothing is called; the application is only recorded.

use std::borrow::Cow;

use super::error::PickleErrorKind;
use super::global::Global;
use super::node::{Node, NodeId, ObjectNode, OpaqueNode, check_attributes};
use super::read::{Machine, Result1};

impl<'a> Machine<'a> {
    /// Pushes a class or function: a known one, or the module and name of an unknown one.
    pub(super) fn global(&mut self, module: &'a str, name: &'a str) -> Result1<()> {
        match Global::lookup(module, name) {
            Some(global) => self.push(Node::Global(global)),
            None => self.push(Node::Foreign(module, name)),
        }
    }

    /// Returns the class that a persistent id stands for: before torch 1.6, the class of a module
    /// that was saved whole was saved as `('module', class, file, source)`.
    pub(super) fn class_of_module(&self, id: NodeId) -> Option<NodeId> {
        let Node::Tuple(parts) = *self.node(id) else {
            return None;
        };
        let [kind, class, _file, _source] = *self.tuple(parts) else {
            return None;
        };
        let is_module = matches!(self.node(kind), Node::Str("module"));
        (is_module && matches!(self.node(class), Node::Foreign(..) | Node::Global(_)))
            .then_some(class)
    }

    /// Records the application `global(*args)`. Calls that build containers and bytes become plain
    /// nodes.
    pub(super) fn object(&mut self, global: NodeId, args: NodeId) -> Result1<()> {
        let global = match self.node(global) {
            Node::Global(global) => *global,
            Node::Foreign(module, name) => return self.opaque(module, name, args),
            Node::Opaque(object) => return self.opaque(object.module, object.name, args),
            other => {
                return Err(PickleErrorKind::Kind {
                    expected: "a global to apply",
                    found: other.kind(),
                });
            }
        };
        let Node::Tuple(values) = *self.node(args) else {
            let found = self.node(args).kind();
            return Err(PickleErrorKind::Kind {
                expected: "a tuple of arguments",
                found,
            });
        };
        let first = self.tuple(values).first().copied();
        let second = self.tuple(values).get(1).copied();
        let node = match global {
            Global::OrderedDict => Node::Dict(self.dict_of(first)?),
            // The factory of its values comes first.
            Global::DefaultDict => Node::Dict(self.dict_of(second)?),
            Global::Set => Node::Set(self.items_of(first)?),
            Global::FrozenSet => Node::FrozenSet(self.items_of(first)?),
            Global::CodecsEncode => Node::Bytes(Cow::Owned(self.encoded(first, second)?)),
            // Python before 3.8 spells its bytes as text.
            Global::ByteArray if second.is_some() => {
                Node::ByteArray(Cow::Owned(self.encoded(first, second)?))
            }
            Global::ByteArray => Node::ByteArray(self.bytes_of(first)?),
            Global::Bytes => Node::Bytes(self.bytes_of(first)?),
            _ => Node::Object(ObjectNode {
                global,
                args,
                state: None,
            }),
        };
        self.push(node)
    }

    /// Pushes an opaque node for an object of an unknown class, or for the result of an unknown
    /// function.
    pub(super) fn opaque(&mut self, module: &'a str, name: &'a str, args: NodeId) -> Result1<()> {
        let node = OpaqueNode {
            module,
            name,
            args,
            state: None,
            items: Vec::new(),
            entries: Vec::new(),
        };
        self.push(Node::Opaque(Box::new(node)))
    }

    /// Charges `count` more items or bytes that are about to be copied.
    fn charge(&mut self, count: usize) -> Result1<()> {
        self.copied = self.copied.saturating_add(count);
        if self.copied > self.bytes.len() {
            let limit = self.bytes.len() as u64;
            return Err(PickleErrorKind::Limit {
                what: "copies of shared values",
                value: self.copied as u64,
                limit,
            });
        }
        Ok(())
    }

    /// Returns how many items or bytes the node holds.
    fn extent(&self, id: NodeId) -> usize {
        match self.node(id) {
            Node::Tuple(tuple) => tuple.len as usize,
            Node::List(items) | Node::Set(items) | Node::FrozenSet(items) => items.len(),
            Node::Str(text) => text.len(),
            Node::Bytes(bytes) | Node::ByteArray(bytes) => bytes.len(),
            Node::Dict(entries) => entries.len(),
            _ => 0,
        }
    }

    /// Makes the dict of `OrderedDict()`, `OrderedDict([[key, value], …])`, `defaultdict(factory,
    /// {key: value, …})`.
    fn dict_of(&mut self, pairs: Option<NodeId>) -> Result1<Vec<(NodeId, NodeId)>> {
        let Some(id) = pairs else {
            return Ok(Vec::new());
        };
        self.charge(self.extent(id))?;
        let pairs = match self.node(id) {
            Node::List(pairs) => pairs,
            Node::Dict(entries) => return Ok(entries.clone()),
            other => {
                return Err(PickleErrorKind::Kind {
                    expected: "a list of pairs, or a dict",
                    found: other.kind(),
                });
            }
        };
        pairs
            .iter()
            .map(|pair| match self.node(*pair) {
                Node::Tuple(pair) if pair.len == 2 => {
                    Ok((self.tuple(*pair)[0], self.tuple(*pair)[1]))
                }
                Node::List(pair) if pair.len() == 2 => Ok((pair[0], pair[1])),
                other => Err(PickleErrorKind::Kind {
                    expected: "a pair",
                    found: other.kind(),
                }),
            })
            .collect()
    }

    /// Makes the items of `set([…])`.
    fn items_of(&mut self, items: Option<NodeId>) -> Result1<Vec<NodeId>> {
        let Some(id) = items else {
            return Ok(Vec::new());
        };
        self.charge(self.extent(id))?;
        match self.node(id) {
            Node::Tuple(tuple) => Ok(self.tuple(*tuple).to_vec()),
            Node::List(items) | Node::Set(items) | Node::FrozenSet(items) => Ok(items.clone()),
            other => Err(PickleErrorKind::Kind {
                expected: "a list",
                found: other.kind(),
            }),
        }
    }

    /// Makes the bytes of `bytearray(b'…')`.
    fn bytes_of(&mut self, bytes: Option<NodeId>) -> Result1<Cow<'a, [u8]>> {
        let Some(id) = bytes else {
            return Ok(Cow::Borrowed(&[]));
        };
        self.charge(self.extent(id))?;
        match self.node(id) {
            Node::Bytes(bytes) | Node::ByteArray(bytes) => Ok(bytes.clone()),
            other => Err(PickleErrorKind::Kind {
                expected: "bytes",
                found: other.kind(),
            }),
        }
    }

    /// Makes the bytes of `_codecs.encode(text, 'latin1')`, and of `bytearray(text, 'latin-1')`.
    fn encoded(&mut self, text: Option<NodeId>, encoding: Option<NodeId>) -> Result1<Vec<u8>> {
        let refused = PickleErrorKind::Value {
            what: "bytes must be spelled as latin1 text",
        };
        let (Some(text), Some(encoding)) = (text, encoding) else {
            return Err(refused);
        };
        self.charge(self.extent(text))?;
        match (self.node(text), self.node(encoding)) {
            (Node::Str(text), Node::Str("latin1" | "latin-1")) => {
                let bytes: Option<Vec<u8>> = text
                    .chars()
                    .map(|c| u8::try_from(u32::from(c)).ok())
                    .collect();
                bytes.ok_or(PickleErrorKind::Text)
            }
            _ => Err(refused),
        }
    }

    /// Sets the state of the object on top.
    pub(super) fn build(&mut self, state: NodeId) -> Result1<()> {
        let expected = "an object without state";
        match self.top_node(expected)? {
            Node::Object(object) if object.state.is_none() => {
                object.state = Some(state);
                // Found here, a large state is refused before more is built.
                check_attributes(self.node(state))
            }
            Node::Opaque(object) if object.state.is_none() => {
                object.state = Some(state);
                Ok(())
            }
            // An OrderedDict with Python attributes (a module's state dict has `_metadata`): the
            // attributes are dropped.
            Node::Dict(_) => Ok(()),
            other => Err(PickleErrorKind::Kind {
                expected,
                found: other.kind(),
            }),
        }
    }
}
