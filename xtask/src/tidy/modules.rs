//! The modules of a crate, read from their sources: items, imports, and the file that each path
//! leads to.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result};
use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{Attribute, Item, Meta, Token, UseTree, Visibility};

/// A chain of re-exports longer than this is not followed.
const MAX_REEXPORTS: usize = 8;

/// A path split at `::`.
type Segments = Vec<String>;

/// A module of a crate. Modules for tests only are left out.
#[derive(Debug, Default)]
pub(super) struct Module {
    /// The path of the module, without `crate`: empty for the root.
    path: Segments,
    /// The file that holds the module.
    file: String,
    /// The names of its child modules.
    children: BTreeSet<String>,
    /// The names of its other items.
    items: BTreeSet<String>,
    /// The names of its `pub` structs, enums and traits.
    pub(super) public_types: Vec<String>,
    /// Its `use` declarations, one for each name.
    imports: Vec<Import>,
    /// The paths that its code names.
    mentions: BTreeSet<Segments>,
}

/// One name of a `use` declaration.
#[derive(Debug)]
struct Import {
    path: Segments,
    /// The name it gets here; `None` for `*`.
    name: Option<String>,
    /// `true` for `pub use`, whatever the scope.
    public: bool,
}

/// All modules of a crate.
#[derive(Debug, Default)]
pub(super) struct Modules(Vec<Module>);

/// Reads the modules of a crate, from the texts of all files by name.
struct Reader<'a> {
    files: &'a BTreeMap<String, String>,
    modules: Modules,
}

impl Reader<'_> {
    /// Reads the module of one file. The files of its children lie in `directory`.
    fn read_file(&mut self, path: Segments, file: &str, directory: &str) -> Result<()> {
        let text = self
            .files
            .get(file)
            .with_context(|| format!("there is no `{file}`"))?;
        let parsed = syn::parse_file(text).with_context(|| format!("failed to parse `{file}`"))?;
        self.read_items(&parsed.items, path, file, directory)
    }

    fn read_items(
        &mut self,
        items: &[Item],
        path: Segments,
        file: &str,
        directory: &str,
    ) -> Result<()> {
        let mut module = Module {
            path: path.clone(),
            file: file.to_owned(),
            ..Module::default()
        };
        for item in items {
            if is_for_tests(attributes(item)) {
                continue;
            }
            match item {
                Item::Mod(item) => {
                    let name = item.ident.to_string();
                    let below = format!("{directory}/{name}");
                    let mut child = path.clone();
                    child.push(name.clone());
                    if let Some((_, items)) = &item.content {
                        // It is in the same file, but its own children are in a folder of its name.
                        self.read_items(items, child, file, &below)?;
                    } else {
                        let mut child_file = format!("{below}.rs");
                        if !self.files.contains_key(&child_file) {
                            child_file = format!("{below}/mod.rs");
                        }
                        self.read_file(child, &child_file, &below)?;
                    }
                    module.children.insert(name);
                }
                Item::Use(item) => {
                    let public = !matches!(item.vis, Visibility::Inherited);
                    flatten(&item.tree, &[], public, &mut module.imports);
                }
                _ => module.add(item),
            }
        }
        self.modules.0.push(module);
        Ok(())
    }
}

impl Modules {
    /// Reads the modules of a crate from the texts of its files, starting with the file `root`.
    pub(super) fn read(files: &BTreeMap<String, String>, root: &str) -> Result<Modules> {
        let mut reader = Reader {
            files,
            modules: Modules::default(),
        };
        let directory = root.rsplit_once('/').map_or("", |(directory, _)| directory);
        reader.read_file(Vec::new(), root, directory)?;
        Ok(reader.modules)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &Module)> {
        self.0.iter().map(|module| (module.file.as_str(), module))
    }

    fn get(&self, path: &[String]) -> Option<&Module> {
        self.0.iter().find(|module| module.path == path)
    }

    /// Returns the pairs of different files of which the first uses an item of the second.
    ///
    /// A module that declares a child, or exports what a descendant holds, does not use it by that
    /// alone. An item is used where it is defined, not where it is exported again.
    pub(super) fn uses(&self) -> BTreeSet<(String, String)> {
        let mut found = BTreeSet::new();
        for module in &self.0 {
            let imports = module
                .imports
                .iter()
                .map(|import| (&import.path, import.public));
            let mentions = module.mentions.iter().map(|path| (path, false));
            for (path, public) in imports.chain(mentions) {
                // Imports of other crates make no circle.
                let Some(target) = self.resolve(module, path, MAX_REEXPORTS) else {
                    continue;
                };
                let exported = public && target.path.starts_with(&module.path);
                if target.file != module.file && !exported {
                    found.insert((module.file.clone(), target.file.clone()));
                }
            }
        }
        found
    }

    /// Finds the module that defines the item of a path, or that the path names; `None` if it leads
    /// out of the crate.
    fn resolve(&self, from: &Module, path: &[String], reexports: usize) -> Option<&Module> {
        let mut at = from.path.clone();
        let mut rest = path;
        match rest.first()?.as_str() {
            "crate" => {
                at.clear();
                rest = &rest[1..];
            }
            "self" => rest = &rest[1..],
            "super" => {
                while rest.first().is_some_and(|segment| segment == "super") {
                    at.pop()?;
                    rest = &rest[1..];
                }
            }
            // A path that starts with another name is in this crate only if the name is that of a
            // child module.
            name if !from.children.contains(name) => return None,
            _ => {}
        }
        // Walks down the child modules, then looks for the item in the module that they lead to.
        let mut module = self.get(&at)?;
        while let Some((name, tail)) = rest
            .split_first()
            .filter(|(name, _)| module.children.contains(*name))
        {
            at.push(name.clone());
            module = self.get(&at)?;
            rest = tail;
        }
        let Some(name) = rest.first() else {
            return Some(module);
        };
        if module.items.contains(name) {
            return Some(module);
        }
        let reexports = reexports.checked_sub(1)?;
        if let Some(import) = module
            .imports
            .iter()
            .find(|import| import.name.as_ref() == Some(name))
        {
            let further: Segments = import.path.iter().chain(&rest[1..]).cloned().collect();
            return self.resolve(module, &further, reexports);
        }
        // A glob import brings the name in if the module that it leads to has it. If none has, the
        // name comes from a macro, or from another crate: the module itself is the best answer.
        let globs = module.imports.iter().filter(|import| import.name.is_none());
        let mut exporters = globs.filter_map(|glob| self.resolve(module, &glob.path, reexports));
        exporters
            .find(|exporter| exporter.items.contains(name))
            .or(Some(module))
    }
}

impl Module {
    fn add(&mut self, item: &Item) {
        let (name, visibility) = match item {
            Item::Struct(item) => (Some(&item.ident), Some(&item.vis)),
            Item::Enum(item) => (Some(&item.ident), Some(&item.vis)),
            Item::Trait(item) => (Some(&item.ident), Some(&item.vis)),
            Item::Union(item) => (Some(&item.ident), None),
            Item::Type(item) => (Some(&item.ident), None),
            Item::Const(item) => (Some(&item.ident), None),
            Item::Static(item) => (Some(&item.ident), None),
            Item::Fn(item) => (Some(&item.sig.ident), None),
            Item::Macro(item) => (item.ident.as_ref(), None),
            _ => (None, None),
        };
        if let Some(name) = name {
            self.items.insert(name.to_string());
            if matches!(visibility, Some(Visibility::Public(_))) {
                self.public_types.push(name.to_string());
            }
        }
        Mentions(&mut self.mentions).visit_item(item);
    }
}

/// Collects the paths of an item's code.
struct Mentions<'a>(&'a mut BTreeSet<Segments>);

impl<'ast> Visit<'ast> for Mentions<'_> {
    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() && path.segments.len() > 1 {
            self.0.insert(
                path.segments
                    .iter()
                    .map(|segment| segment.ident.to_string())
                    .collect(),
            );
        }
        visit::visit_path(self, path);
    }

    /// Takes the paths of a `use` inside a function, which is no import of the module.
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let mut imports = Vec::new();
        flatten(&item.tree, &[], false, &mut imports);
        self.0.extend(imports.into_iter().map(|import| import.path));
    }

    /// Does nothing: the module of `pub(in ...)` is not used by it.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}

    /// Does nothing: paths in attributes are those of macros.
    fn visit_attribute(&mut self, _: &'ast Attribute) {}
}

/// Lists the names that a `use` tree brings in.
fn flatten(tree: &UseTree, before: &[String], public: bool, imports: &mut Vec<Import>) {
    match tree {
        UseTree::Path(tree) => {
            let path: Segments = before
                .iter()
                .cloned()
                .chain([tree.ident.to_string()])
                .collect();
            flatten(&tree.tree, &path, public, imports);
        }
        UseTree::Group(tree) => tree
            .items
            .iter()
            .for_each(|tree| flatten(tree, before, public, imports)),
        UseTree::Glob(_) => imports.push(Import {
            path: before.to_vec(),
            name: None,
            public,
        }),
        UseTree::Name(tree) => imports.push(named(before, &tree.ident, &tree.ident, public)),
        UseTree::Rename(tree) => imports.push(named(before, &tree.ident, &tree.rename, public)),
    }
}

/// Returns the import of one name: `ident` is the last part of the path, and `name` what it is
/// called here (after `as`).
fn named(before: &[String], ident: &syn::Ident, name: &syn::Ident, public: bool) -> Import {
    // `use a::{self}` brings in `a`.
    if ident == "self" {
        let name = if name == "self" {
            before.last().cloned()
        } else {
            Some(name.to_string())
        };
        return Import {
            path: before.to_vec(),
            name,
            public,
        };
    }
    let path = before.iter().cloned().chain([ident.to_string()]).collect();
    Import {
        path,
        name: Some(name.to_string()),
        public,
    }
}

/// Returns `true` if an item is there in builds of tests only: `#[test]`, `#[cfg(test)]`, or
/// `#[cfg(all(test, ...))]`.
pub(super) fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        if attribute.path().is_ident("test") {
            return true;
        }
        attribute.path().is_ident("cfg")
            && attribute
                .parse_args::<Meta>()
                .is_ok_and(|condition| needs_test(&condition))
    })
}

/// Returns `true` if a condition of `cfg` holds in builds of tests only.
fn needs_test(condition: &Meta) -> bool {
    match condition {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("all") => list
            .parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated)
            .is_ok_and(|conditions| conditions.iter().any(needs_test)),
        _ => false,
    }
}

pub(super) fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uses(files: &[(&str, &str)]) -> Vec<(String, String)> {
        let files = files
            .iter()
            .map(|&(file, text)| (file.to_owned(), text.to_owned()))
            .collect();
        Modules::read(&files, "src/lib.rs")
            .unwrap()
            .uses()
            .into_iter()
            .collect()
    }

    fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
        expected
            .iter()
            .map(|&(from, to)| (from.to_owned(), to.to_owned()))
            .collect()
    }

    #[test]
    fn imports_and_paths_in_code_are_uses() {
        let found = uses(&[
            ("src/lib.rs", "mod a; mod b; mod c; mod d;"),
            ("src/a.rs", "use crate::b::B; fn f() { crate::c::g(); }"),
            ("src/b.rs", "use super::c; pub struct B;"),
            ("src/c.rs", "pub fn g() { use crate::d::D; }"),
            ("src/d.rs", "pub struct D; use std::fmt::Debug;"),
        ]);
        let expected = [
            ("src/a.rs", "src/b.rs"),
            ("src/a.rs", "src/c.rs"),
            ("src/b.rs", "src/c.rs"),
            ("src/c.rs", "src/d.rs"),
        ];
        assert_eq!(found, pairs(&expected));
    }

    #[test]
    fn a_parent_that_declares_or_exports_a_child_does_not_use_it_but_one_that_calls_it_does() {
        let child = ("src/a/child.rs", "use super::helper; pub struct C;");
        let root = ("src/lib.rs", "mod a; pub use a::C;");
        let parent = "mod child; pub use self::child::C; fn helper() {}";
        assert_eq!(
            uses(&[root, ("src/a/mod.rs", parent), child]),
            pairs(&[("src/a/child.rs", "src/a/mod.rs")])
        );
        let parent = "mod child; pub use child::C; fn helper() {} fn f() { child::run() }";
        let both = [
            ("src/a/child.rs", "src/a/mod.rs"),
            ("src/a/mod.rs", "src/a/child.rs"),
        ];
        assert_eq!(uses(&[root, ("src/a/mod.rs", parent), child]), pairs(&both));
    }

    #[test]
    fn an_item_is_used_where_it_is_defined_not_where_it_is_exported() {
        let found = uses(&[
            (
                "src/lib.rs",
                "mod a; mod b; mod c; pub use a::*; pub(crate) use b::{self as other, B as Renamed};",
            ),
            ("src/a.rs", "pub struct A;"),
            ("src/b.rs", "pub struct B;"),
            (
                "src/c.rs",
                "use crate::{A, Renamed}; fn f() { super::other::g() }",
            ),
        ]);
        assert_eq!(
            found,
            pairs(&[("src/c.rs", "src/a.rs"), ("src/c.rs", "src/b.rs")])
        );
    }

    #[test]
    fn code_for_tests_visibilities_and_modules_within_a_file_are_no_uses() {
        let found = uses(&[
            ("src/lib.rs", "mod a; mod b;"),
            (
                "src/a.rs",
                "#[cfg(test)] mod tests { use crate::b::B; } mod inner { use super::A; } struct A;",
            ),
            (
                "src/b.rs",
                "pub(super) struct B; pub(in crate::a) fn f() {}",
            ),
        ]);
        assert!(found.is_empty(), "{found:?}");
    }
}
