//! Finds the rule that matches each key, and computes the new keys.

use std::collections::HashSet;

use fsdp_formats::metadata::Metadata;
use indexmap::IndexMap;

use super::node::Node;
use super::operation::Operation;
use super::rule::{Map, MapError, Rule};
use super::template::{Bindings, Template};

/// The new keys of a checkpoint.
#[derive(Debug, Default)]
pub(super) struct Matched {
    /// The new tensors.
    pub(super) tensors: IndexMap<String, Node>,
    /// The new keys of what keeps its content, with the old ones.
    pub(super) renamed: IndexMap<String, String>,
    /// The keys that no rule fits, and that stay as they are.
    pub(super) unmatched: Vec<String>,
}

/// Applies a map to the keys of a checkpoint.
pub(super) fn matched(map: &Map, metadata: &Metadata) -> Result<Matched, MapError> {
    let mut state = State {
        metadata,
        taken: HashSet::new(),
        matched: Matched::default(),
    };
    let mut fits = false;
    for rule in &map.rules {
        let is_used = state.apply(rule)?;
        if !is_used && !map.is_builtin {
            return Err(MapError::Unused { line: rule.line });
        }
        fits |= is_used;
    }
    if !fits {
        return Err(MapError::UnusedMap);
    }
    let State {
        taken, mut matched, ..
    } = state;
    for fqn in metadata.entries.keys().filter(|fqn| !taken.contains(*fqn)) {
        if matched.tensors.contains_key(fqn)
            || matched.renamed.insert(fqn.clone(), fqn.clone()).is_some()
        {
            return Err(MapError::Twice { fqn: fqn.clone() });
        }
        matched.unmatched.push(fqn.clone());
    }
    Ok(matched)
}

struct State<'m> {
    metadata: &'m Metadata,
    /// The old keys that a rule has taken.
    taken: HashSet<String>,
    matched: Matched,
}

impl State<'_> {
    /// Applies a rule to all keys that it fits. Returns `false` if it fits none.
    fn apply(&mut self, rule: &Rule) -> Result<bool, MapError> {
        let mut fits = Vec::new();
        for fqn in self
            .metadata
            .entries
            .keys()
            .filter(|fqn| !self.taken.contains(*fqn))
        {
            if let Some(bindings) = rule.sources[0].matches(fqn) {
                fits.push((fqn.clone(), bindings));
            }
        }
        if rule.targets.is_empty() {
            for source in &rule.sources {
                let keys = self
                    .metadata
                    .entries
                    .keys()
                    .filter(|fqn| source.matches(fqn).is_some());
                let keys: Vec<String> = keys.cloned().collect();
                fits.extend(keys.iter().map(|fqn| (fqn.clone(), Bindings::new())));
                self.taken.extend(keys);
            }
            return Ok(!fits.is_empty());
        }
        match rule.operations.last() {
            Some(Operation::Stack { name }) => self.apply_stack(rule, name, fits),
            _ => {
                let mut is_used = false;
                for (fqn, bindings) in fits {
                    is_used |= self.apply_to(rule, &fqn, bindings)?;
                }
                Ok(is_used)
            }
        }
    }

    /// Applies a rule to one key, and to the others that belong to it.
    fn apply_to(&mut self, rule: &Rule, fqn: &str, bindings: Bindings) -> Result<bool, MapError> {
        let error = |reason: String| MapError::Tensor {
            line: rule.line,
            fqn: fqn.to_owned(),
            reason,
        };
        let Some(sources) = self.sources(rule, &bindings)? else {
            return Ok(false);
        };
        // Without operations, values move too.
        if rule.operations.is_empty() {
            for (source, target) in sources.iter().zip(&rule.targets) {
                let target = target
                    .fill(&bindings)
                    .ok_or_else(|| error("a new key lacks a name".to_owned()))?;
                self.rename(source, target)?;
            }
            return Ok(true);
        }
        let nodes = self.nodes(rule, &sources)?;
        match &rule.operations[0] {
            Operation::Unstack { name } => {
                let [node] = <[Node; 1]>::try_from(nodes)
                    .map_err(|_| error("`unstack` takes one tensor".to_owned()))?;
                for (index, node) in node.unstacked().map_err(error)?.into_iter().enumerate() {
                    let mut bindings = bindings.clone();
                    bindings.insert(name.clone(), index.to_string());
                    self.give(rule, fqn, &bindings, vec![node])?;
                }
            }
            _ => self.give(rule, fqn, &bindings, nodes)?,
        }
        Ok(true)
    }

    /// Applies a rule that stacks: the keys that differ in one name only are one tensor.
    fn apply_stack(
        &mut self,
        rule: &Rule,
        name: &str,
        fits: Vec<(String, Bindings)>,
    ) -> Result<bool, MapError> {
        let mut stacks: IndexMap<String, Vec<(usize, String, Bindings)>> = IndexMap::new();
        for (fqn, bindings) in fits {
            let error = |reason: &str| MapError::Tensor {
                line: rule.line,
                fqn: fqn.clone(),
                reason: reason.to_owned(),
            };
            let index = bindings.get(name).and_then(|text| text.parse().ok());
            let index = index.ok_or_else(|| error("its place in the stack is no number"))?;
            let target = rule.targets[0]
                .fill(&bindings)
                .ok_or_else(|| error("the new key lacks a name"))?;
            stacks
                .entry(target)
                .or_default()
                .push((index, fqn, bindings));
        }
        let is_used = !stacks.is_empty();
        for (target, mut layers) in stacks {
            layers.sort_unstable_by_key(|(index, ..)| *index);
            let mut nodes = Vec::new();
            let mut dtype = None;
            for (place, (index, fqn, bindings)) in layers.into_iter().enumerate() {
                let error = |reason: String| MapError::Tensor {
                    line: rule.line,
                    fqn: fqn.clone(),
                    reason,
                };
                if index != place {
                    return Err(error(format!("number {place} of the stack is missing")));
                }
                let sources = self.sources(rule, &bindings)?;
                let sources =
                    sources.ok_or_else(|| error("its other tensors are missing".to_owned()))?;
                let own = self
                    .metadata
                    .tensor(&fqn)
                    .map(|tensor| tensor.properties.dtype);
                if *dtype.get_or_insert(own) != own {
                    return Err(error(
                        "its dtype is not that of the tensors before it in the stack".to_owned(),
                    ));
                }
                let made = self.operate(rule, &fqn, self.nodes(rule, &sources)?)?;
                self.taken.extend(sources);
                nodes.extend(made);
            }
            let error = |reason| MapError::Tensor {
                line: rule.line,
                fqn: target.clone(),
                reason,
            };
            let node = Node::stacked(nodes).map_err(error)?;
            self.insert(target, node)?;
        }
        Ok(is_used)
    }

    /// Returns the old keys of a rule for these texts; `None` if one is not there, or taken.
    fn sources(&self, rule: &Rule, bindings: &Bindings) -> Result<Option<Vec<String>>, MapError> {
        let fill = |source: &Template| source.fill(bindings);
        let is_free =
            |fqn: &String| self.metadata.entries.contains_key(fqn) && !self.taken.contains(fqn);
        Ok(rule
            .sources
            .iter()
            .map(|source| fill(source).filter(is_free))
            .collect())
    }

    /// Returns the tensors that a rule takes, which must have one dtype.
    fn nodes(&self, rule: &Rule, sources: &[String]) -> Result<Vec<Node>, MapError> {
        let mut nodes = Vec::new();
        let mut dtype = None;
        for fqn in sources {
            let error = |reason: &str| MapError::Tensor {
                line: rule.line,
                fqn: fqn.clone(),
                reason: reason.to_owned(),
            };
            let tensor = self
                .metadata
                .tensor(fqn)
                .ok_or_else(|| error("it is a value, and no tensor"))?;
            if *dtype.get_or_insert(tensor.properties.dtype) != tensor.properties.dtype {
                return Err(error(
                    "its dtype is another one than that of the tensors before",
                ));
            }
            nodes.push(Node::source(fqn, &tensor.shape));
        }
        Ok(nodes)
    }

    /// Applies the operations between the first and the last that change keys.
    fn operate(&self, rule: &Rule, fqn: &str, mut nodes: Vec<Node>) -> Result<Vec<Node>, MapError> {
        for operation in &rule.operations {
            let made = operation.apply(nodes, rule.targets.len());
            nodes = made.map_err(|reason| MapError::Tensor {
                line: rule.line,
                fqn: fqn.to_owned(),
                reason,
            })?;
        }
        Ok(nodes)
    }

    /// Gives the new keys to what the operations make of tensors.
    fn give(
        &mut self,
        rule: &Rule,
        fqn: &str,
        bindings: &Bindings,
        nodes: Vec<Node>,
    ) -> Result<(), MapError> {
        let mut found = Vec::new();
        nodes.iter().for_each(|node| node.sources(&mut found));
        let found: Vec<String> = found.into_iter().map(str::to_owned).collect();
        let made = self.operate(rule, fqn, nodes)?;
        self.taken.extend(found);
        for (target, node) in rule.targets.iter().zip(made) {
            let reason = || "a new key lacks a name".to_owned();
            let name = target.fill(bindings);
            let name = name.ok_or_else(|| MapError::Tensor {
                line: rule.line,
                fqn: fqn.to_owned(),
                reason: reason(),
            })?;
            self.insert(name, node)?;
        }
        Ok(())
    }

    /// Adds a tensor. Two rules must not give the same key.
    fn insert(&mut self, fqn: String, node: Node) -> Result<(), MapError> {
        if self.matched.renamed.contains_key(&fqn)
            || self.matched.tensors.insert(fqn.clone(), node).is_some()
        {
            return Err(MapError::Twice { fqn });
        }
        Ok(())
    }

    /// Gives a tensor or value another key.
    fn rename(&mut self, source: &str, target: String) -> Result<(), MapError> {
        self.taken.insert(source.to_owned());
        if self.matched.tensors.contains_key(&target) || self.matched.renamed.contains_key(&target)
        {
            return Err(MapError::Twice { fqn: target });
        }
        self.matched.renamed.insert(target, source.to_owned());
        Ok(())
    }
}
