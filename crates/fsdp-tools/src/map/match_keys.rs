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
    let mut matcher = Matcher {
        metadata,
        taken: HashSet::new(),
        matched: Matched::default(),
    };
    let mut fits = false;
    for rule in &map.rules {
        let is_used = matcher.apply(rule)?;
        // A map that is built in has rules for several variants of a model.
        if !is_used && !map.is_builtin {
            return Err(MapError::Unused { line: rule.line });
        }
        fits |= is_used;
    }
    if !fits {
        return Err(MapError::UnusedMap);
    }
    // All keys that no rule has taken stay as they are.
    for fqn in metadata.entries.keys() {
        if !matcher.taken.contains(fqn) {
            matcher.rename(fqn, fqn.clone())?;
            matcher.matched.unmatched.push(fqn.clone());
        }
    }
    Ok(matcher.matched)
}

/// A rule on its way through the keys.
struct Matcher<'m> {
    metadata: &'m Metadata,
    /// The old keys that a rule has taken.
    taken: HashSet<String>,
    matched: Matched,
}

/// Returns the error that a rule fits a key, but not its tensors.
fn misfit(rule: &Rule, fqn: &str, reason: impl Into<String>) -> MapError {
    MapError::Tensor {
        line: rule.line,
        fqn: fqn.to_owned(),
        reason: reason.into(),
    }
}

impl Matcher<'_> {
    /// Applies a rule to all keys that it fits. Returns `false` if it fits none.
    fn apply(&mut self, rule: &Rule) -> Result<bool, MapError> {
        if rule.targets.is_empty() {
            return Ok(self.drop_keys(rule));
        }
        // Step 1: find the keys that the first old key of the rule fits.
        let mut fits = Vec::new();
        for fqn in self.metadata.entries.keys() {
            if !self.taken.contains(fqn)
                && let Some(bindings) = rule.sources[0].matches(fqn)
            {
                fits.push((fqn.clone(), bindings));
            }
        }
        if let Some(Operation::Stack { name }) = rule.operations.last() {
            return self.apply_stack(rule, name, fits);
        }
        // Step 2: apply the rule to each, together with the keys that belong to it.
        let mut is_used = false;
        for (fqn, bindings) in fits {
            is_used |= self.apply_to(rule, &fqn, &bindings)?;
        }
        Ok(is_used)
    }

    /// Takes the keys of a rule that drops them. Returns `false` if it fits none.
    fn drop_keys(&mut self, rule: &Rule) -> bool {
        let mut is_used = false;
        for fqn in self.metadata.entries.keys() {
            if rule
                .sources
                .iter()
                .any(|source| source.matches(fqn).is_some())
            {
                self.taken.insert(fqn.clone());
                is_used = true;
            }
        }
        is_used
    }

    /// Applies a rule to one key, and to the others that belong to it.
    fn apply_to(&mut self, rule: &Rule, fqn: &str, bindings: &Bindings) -> Result<bool, MapError> {
        let Some(sources) = self.sources(rule, bindings) else {
            return Ok(false);
        };
        // Without operations, values move too.
        let Some(first_operation) = rule.operations.first() else {
            for (source, target) in sources.iter().zip(&rule.targets) {
                self.rename(source, new_key(rule, fqn, target, bindings)?)?;
            }
            return Ok(true);
        };
        let nodes = self.nodes(rule, &sources)?;
        let Operation::Unstack { name } = first_operation else {
            self.add_tensors(rule, fqn, bindings, nodes)?;
            return Ok(true);
        };
        let [node] = <[Node; 1]>::try_from(nodes)
            .map_err(|_| misfit(rule, fqn, "`unstack` takes one tensor"))?;
        // Each index of the first dimension becomes the name in the new keys.
        let unstacked = node
            .unstacked()
            .map_err(|reason| misfit(rule, fqn, reason))?;
        for (index, node) in unstacked.into_iter().enumerate() {
            let mut bindings = bindings.clone();
            bindings.insert(name.clone(), index.to_string());
            self.add_tensors(rule, fqn, &bindings, vec![node])?;
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
        // The layers of each stack with their numbers, by the new key.
        let mut stacks: IndexMap<String, Vec<(usize, String, Bindings)>> = IndexMap::new();
        for (fqn, bindings) in fits {
            let number = bindings
                .get(name)
                .and_then(|text| text.parse().ok())
                .ok_or_else(|| misfit(rule, &fqn, "its place in the stack is no number"))?;
            let target = new_key(rule, &fqn, &rule.targets[0], &bindings)?;
            stacks
                .entry(target)
                .or_default()
                .push((number, fqn, bindings));
        }
        let is_used = !stacks.is_empty();
        for (target, mut layers) in stacks {
            // The layers must be numbered from 0 without gaps: a missing one would shift the
            // others.
            layers.sort_unstable_by_key(|(number, ..)| *number);
            let mut nodes = Vec::new();
            let mut dtype = None;
            for (place, (number, fqn, bindings)) in layers.into_iter().enumerate() {
                if number != place {
                    let reason = format!("number {place} of the stack is missing");
                    return Err(misfit(rule, &fqn, reason));
                }
                let sources = self
                    .sources(rule, &bindings)
                    .ok_or_else(|| misfit(rule, &fqn, "its other tensors are missing"))?;
                let own = self
                    .metadata
                    .tensor(&fqn)
                    .map(|tensor| tensor.properties.dtype);
                if *dtype.get_or_insert(own) != own {
                    let reason = "its dtype is not that of the tensors before it in the stack";
                    return Err(misfit(rule, &fqn, reason));
                }
                nodes.extend(operate(rule, &fqn, self.nodes(rule, &sources)?)?);
                self.taken.extend(sources);
            }
            let node = Node::stacked(nodes).map_err(|reason| misfit(rule, &target, reason))?;
            self.insert(target, node)?;
        }
        Ok(is_used)
    }

    /// Returns the old keys of a rule for these texts; `None` if one is not there, or taken.
    fn sources(&self, rule: &Rule, bindings: &Bindings) -> Option<Vec<String>> {
        let is_free =
            |fqn: &String| self.metadata.entries.contains_key(fqn) && !self.taken.contains(fqn);
        rule.sources
            .iter()
            .map(|source| source.fill(bindings).filter(is_free))
            .collect()
    }

    /// Returns the tensors that a rule takes, which must have one dtype.
    fn nodes(&self, rule: &Rule, sources: &[String]) -> Result<Vec<Node>, MapError> {
        let mut nodes = Vec::new();
        // Tensors are moved and never cast, so a new tensor has the one dtype of its parts.
        let mut dtype = None;
        for fqn in sources {
            let tensor = self
                .metadata
                .tensor(fqn)
                .ok_or_else(|| misfit(rule, fqn, "it is a value, and no tensor"))?;
            if *dtype.get_or_insert(tensor.properties.dtype) != tensor.properties.dtype {
                let reason = "its dtype is another one than that of the tensors before";
                return Err(misfit(rule, fqn, reason));
            }
            nodes.push(Node::source(fqn, &tensor.shape));
        }
        Ok(nodes)
    }

    /// Adds what the operations make of tensors, under the new keys of a rule.
    fn add_tensors(
        &mut self,
        rule: &Rule,
        fqn: &str,
        bindings: &Bindings,
        nodes: Vec<Node>,
    ) -> Result<(), MapError> {
        let mut sources = Vec::new();
        nodes.iter().for_each(|node| node.sources(&mut sources));
        let sources: Vec<String> = sources.into_iter().map(str::to_owned).collect();
        // Nothing is taken before the operations have succeeded.
        let made = operate(rule, fqn, nodes)?;
        self.taken.extend(sources);
        for (target, node) in rule.targets.iter().zip(made) {
            self.insert(new_key(rule, fqn, target, bindings)?, node)?;
        }
        Ok(())
    }

    /// Adds a tensor. Two rules must not give the same key.
    fn insert(&mut self, fqn: String, node: Node) -> Result<(), MapError> {
        self.check_free(&fqn)?;
        self.matched.tensors.insert(fqn, node);
        Ok(())
    }

    /// Gives a tensor or value another key.
    fn rename(&mut self, source: &str, target: String) -> Result<(), MapError> {
        self.taken.insert(source.to_owned());
        self.check_free(&target)?;
        self.matched.renamed.insert(target, source.to_owned());
        Ok(())
    }

    /// Refuses a new key that another rule has given.
    fn check_free(&self, fqn: &str) -> Result<(), MapError> {
        if self.matched.tensors.contains_key(fqn) || self.matched.renamed.contains_key(fqn) {
            return Err(MapError::Twice {
                fqn: fqn.to_owned(),
            });
        }
        Ok(())
    }
}

/// Returns a new key of a rule for these texts.
fn new_key(
    rule: &Rule,
    fqn: &str,
    target: &Template,
    bindings: &Bindings,
) -> Result<String, MapError> {
    target
        .fill(bindings)
        .ok_or_else(|| misfit(rule, fqn, "a new key lacks a name"))
}

/// Applies the operations of a rule. Those that change keys leave the tensors as they are.
fn operate(rule: &Rule, fqn: &str, mut nodes: Vec<Node>) -> Result<Vec<Node>, MapError> {
    for operation in &rule.operations {
        nodes = operation
            .apply(nodes, rule.targets.len())
            .map_err(|reason| misfit(rule, fqn, reason))?;
    }
    Ok(nodes)
}
