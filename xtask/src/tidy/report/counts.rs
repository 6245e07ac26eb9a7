//! Counts what a source file holds, from its syntax tree and its tokens. Code for tests does not
//! count.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use anyhow::{Result, anyhow};
use proc_macro2::{Span, TokenStream, TokenTree};
use syn::spanned::Spanned as _;
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, ImplItem, Item, Local, Pat, Stmt, Visibility};

use crate::tidy::modules::{attributes, is_for_tests};

/// The most characters of a line of code.
const MAX_WIDTH: usize = 100;

/// The most parameters of a function, `self` included.
const MAX_PARAMETERS: usize = 5;

/// The macros that assert what the code around them guarantees.
const ASSERTIONS: [&str; 7] = [
    "assert",
    "assert_eq",
    "assert_ne",
    "debug_assert",
    "debug_assert_eq",
    "debug_assert_ne",
    "unreachable",
];

/// The counts of a file, or of many files together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// Lines with code on them.
    pub(super) code_lines: usize,
    /// Characters of code, without white space.
    pub(super) characters: usize,
    pub(super) functions: usize,
    /// Structs, enums and unions.
    pub(super) types: usize,
    /// Items that are `pub`, without a restriction; fields and variants are none.
    pub(super) public_items: usize,
    /// Names that two or more types of one package have.
    pub(super) repeated_types: usize,
    /// Closures that are bound to a name: `let f = |x| ...`.
    pub(super) let_closures: usize,
    /// Tuples that are built to be taken apart: `let (a, b) = (x, y)`.
    pub(super) tuple_lets: usize,
    /// Names that a block binds by `let` once more.
    pub(super) repeated_lets: usize,
    /// Lines of code with more than [`MAX_WIDTH`] characters.
    pub(super) wide_lines: usize,
    /// Functions with more than [`MAX_PARAMETERS`] parameters.
    pub(super) long_signatures: usize,
    /// Functions without `self` that are called `of`.
    pub(super) of_constructors: usize,
    /// Uses of `unwrap_or_default`.
    pub(super) silent_defaults: usize,
    /// Uses of `expect` and of [`ASSERTIONS`].
    pub(super) assertions: usize,
    /// Lines with nothing but a `//` comment.
    pub(super) comment_lines: usize,
    /// Lines of doc comments.
    pub(super) doc_lines: usize,
}

impl Counts {
    /// Adds the counts of something else.
    pub(super) fn add(&mut self, other: &Counts) {
        self.code_lines += other.code_lines;
        self.characters += other.characters;
        self.functions += other.functions;
        self.types += other.types;
        self.public_items += other.public_items;
        self.repeated_types += other.repeated_types;
        self.let_closures += other.let_closures;
        self.tuple_lets += other.tuple_lets;
        self.repeated_lets += other.repeated_lets;
        self.wide_lines += other.wide_lines;
        self.long_signatures += other.long_signatures;
        self.of_constructors += other.of_constructors;
        self.silent_defaults += other.silent_defaults;
        self.assertions += other.assertions;
        self.comment_lines += other.comment_lines;
        self.doc_lines += other.doc_lines;
    }
}

/// One source file, counted.
#[derive(Debug, Default)]
pub(super) struct CountedFile {
    pub(super) counts: Counts,
    /// The name of each struct, enum and union.
    pub(super) type_names: Vec<String>,
    /// The names of the modules for tests that lie in files of their own.
    pub(super) test_modules: Vec<String>,
}

/// Counts one source file.
pub(super) fn count(text: &str) -> Result<CountedFile> {
    let syntax = syn::parse_file(text)?;
    let mut reader = SyntaxReader::default();
    reader.visit_file(&syntax);

    // The tree has no comments between items, and macros are tokens only. So lines, characters and
    // calls are counted from the tokens, which have their places in the text.
    let tokens: TokenStream = text.parse().map_err(|error| anyhow!("{error}"))?;
    let mut lines = LineReader {
        text,
        tests: &reader.tests,
        code: BTreeSet::new(),
        docs: BTreeSet::new(),
        counts: reader.file.counts,
    };
    lines.read(tokens);
    lines.count_lines();

    reader.file.counts = lines.counts;
    Ok(reader.file)
}

/// Returns how many names are in the list twice or more.
pub(super) fn repeated(names: &[String]) -> usize {
    let mut uses: BTreeMap<&str, usize> = BTreeMap::new();
    for name in names {
        *uses.entry(name).or_default() += 1;
    }
    uses.values().filter(|&&uses| uses > 1).count()
}

/// Counts what the syntax tree shows, and finds the code for tests.
#[derive(Default)]
struct SyntaxReader {
    file: CountedFile,
    /// The items that are code for tests.
    tests: Vec<Span>,
}

impl SyntaxReader {
    fn add_type(&mut self, name: &syn::Ident, visibility: &Visibility) {
        self.file.counts.types += 1;
        self.file.type_names.push(name.to_string());
        self.add_visibility(visibility);
    }

    fn add_visibility(&mut self, visibility: &Visibility) {
        if matches!(visibility, Visibility::Public(_)) {
            self.file.counts.public_items += 1;
        }
    }
}

impl<'ast> Visit<'ast> for SyntaxReader {
    fn visit_item(&mut self, item: &'ast Item) {
        if is_for_tests(attributes(item)) {
            self.tests.push(item.span());
            if let Item::Mod(module) = item
                && module.content.is_none()
            {
                self.file.test_modules.push(module.ident.to_string());
            }
            return;
        }
        match item {
            Item::Struct(item) => self.add_type(&item.ident, &item.vis),
            Item::Enum(item) => self.add_type(&item.ident, &item.vis),
            Item::Union(item) => self.add_type(&item.ident, &item.vis),
            Item::Const(item) => self.add_visibility(&item.vis),
            Item::Fn(item) => self.add_visibility(&item.vis),
            Item::Mod(item) => self.add_visibility(&item.vis),
            Item::Static(item) => self.add_visibility(&item.vis),
            Item::Trait(item) => self.add_visibility(&item.vis),
            Item::Type(item) => self.add_visibility(&item.vis),
            Item::Use(item) => self.add_visibility(&item.vis),
            // Another library has chosen the names and the parameters of its functions.
            Item::ForeignMod(_) => return,
            _ => {}
        }
        visit::visit_item(self, item);
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        let (attributes, visibility): (&[Attribute], _) = match item {
            ImplItem::Const(item) => (&item.attrs, Some(&item.vis)),
            ImplItem::Fn(item) => (&item.attrs, Some(&item.vis)),
            _ => (&[], None),
        };
        if is_for_tests(attributes) {
            self.tests.push(item.span());
            return;
        }
        if let Some(visibility) = visibility {
            self.add_visibility(visibility);
        }
        visit::visit_impl_item(self, item);
    }

    fn visit_signature(&mut self, signature: &'ast syn::Signature) {
        self.file.counts.functions += 1;
        // A function with the interface of C has the parameters that its caller was made for.
        if signature.inputs.len() > MAX_PARAMETERS && signature.abi.is_none() {
            self.file.counts.long_signatures += 1;
        }
        if signature.ident == "of" && signature.receiver().is_none() {
            self.file.counts.of_constructors += 1;
        }
        visit::visit_signature(self, signature);
    }

    fn visit_block(&mut self, block: &'ast syn::Block) {
        let mut bound = BTreeSet::new();
        for statement in &block.stmts {
            if let Stmt::Local(local) = statement
                && let Some(name) = bound_name(local)
                && !bound.insert(name)
            {
                self.file.counts.repeated_lets += 1;
            }
        }
        visit::visit_block(self, block);
    }

    fn visit_local(&mut self, local: &'ast Local) {
        let value = local.init.as_ref().map(|init| &*init.expr);
        match (without_type(&local.pat), value) {
            (Pat::Ident(_), Some(Expr::Closure(_))) => self.file.counts.let_closures += 1,
            (Pat::Tuple(_), Some(Expr::Tuple(_))) => self.file.counts.tuple_lets += 1,
            _ => {}
        }
        visit::visit_local(self, local);
    }
}

/// Returns the name that a `let` binds; `None` if it takes a value apart, or is there in some
/// builds only.
fn bound_name(local: &Local) -> Option<&syn::Ident> {
    let conditional = local
        .attrs
        .iter()
        .any(|attribute| attribute.path().is_ident("cfg"));
    match without_type(&local.pat) {
        Pat::Ident(pattern) if !conditional => Some(&pattern.ident),
        _ => None,
    }
}

/// Returns the pattern of `let pattern: Type`.
fn without_type(pattern: &Pat) -> &Pat {
    match pattern {
        Pat::Type(typed) => &typed.pat,
        pattern => pattern,
    }
}

/// Counts what the tokens show: lines, characters, and calls, also those inside macros.
struct LineReader<'a> {
    text: &'a str,
    /// The items that are code for tests.
    tests: &'a [Span],
    /// The lines with tokens on them.
    code: BTreeSet<usize>,
    /// The lines of doc comments.
    docs: BTreeSet<usize>,
    counts: Counts,
}

impl LineReader<'_> {
    fn read(&mut self, tokens: TokenStream) {
        let mut before = [String::new(), String::new()];
        for token in tokens {
            let [second_last, last] = &before;
            match &token {
                TokenTree::Group(group) if self.is_comment(group.span()) => {
                    if !self.is_for_tests(group.span()) {
                        self.docs.extend(lines(group.span()));
                    }
                }
                TokenTree::Group(group) => {
                    if !self.is_for_tests(group.span()) {
                        self.count_call(second_last, last);
                    }
                    self.read_code(group.span_open());
                    self.read(group.stream());
                    self.read_code(group.span_close());
                }
                token => self.read_code(token.span()),
            }
            before = [before[1].clone(), short_text(&token)];
        }
    }

    /// Counts the call or the macro whose arguments come next, by the two tokens before them.
    fn count_call(&mut self, second_last: &str, last: &str) {
        match (second_last, last) {
            ("." | ":", "unwrap_or_default") => self.counts.silent_defaults += 1,
            (".", "expect") => self.counts.assertions += 1,
            (name, "!") if ASSERTIONS.contains(&name) => self.counts.assertions += 1,
            _ => {}
        }
    }

    /// Counts the lines and characters of one token.
    fn read_code(&mut self, span: Span) {
        // The tokens that stand for a doc comment span all of it.
        if self.is_for_tests(span) || self.is_comment(span) {
            return;
        }
        self.code.extend(lines(span));
        let source = &self.text[span.byte_range()];
        self.counts.characters += source.chars().filter(|c| !c.is_whitespace()).count();
    }

    /// Counts the lines of each kind, after all tokens have been read.
    fn count_lines(&mut self) {
        self.counts.code_lines = self.code.len();
        self.counts.doc_lines = self.docs.len();
        for (index, line) in self.text.lines().enumerate() {
            let number = index + 1;
            if self.code.contains(&number) {
                self.counts.wide_lines += usize::from(line.chars().count() > MAX_WIDTH);
            } else if line.trim_start().starts_with("//")
                && !self.docs.contains(&number)
                && !self.tests.iter().any(|test| lines(*test).contains(&number))
            {
                self.counts.comment_lines += 1;
            }
        }
    }

    fn is_for_tests(&self, span: Span) -> bool {
        let start = span.byte_range().start;
        self.tests
            .iter()
            .any(|test| test.byte_range().contains(&start))
    }

    fn is_comment(&self, span: Span) -> bool {
        let source = &self.text[span.byte_range()];
        source.starts_with("//") || source.starts_with("/*")
    }
}

/// Returns the lines that a span touches.
fn lines(span: Span) -> RangeInclusive<usize> {
    span.start().line..=span.end().line
}

/// Returns the text of a token; nothing for a group of tokens.
fn short_text(token: &TokenTree) -> String {
    match token {
        TokenTree::Group(_) => String::new(),
        token => token.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(text: &str) -> Counts {
        count(text).unwrap().counts
    }

    #[test]
    fn lines_are_code_comments_or_docs_and_white_space_is_no_character() {
        let text = [
            "//! About.",
            "",
            "// Why.",
            "/// What.",
            "/// More.",
            "fn f() { // not a line of its own",
            "    let text = \"é",
            "// b\";",
            "}",
            "//// Neither doc.",
        ];
        let found = counts(&text.join("\n"));
        assert_eq!(found.code_lines, 4);
        assert_eq!(found.comment_lines, 2);
        assert_eq!(found.doc_lines, 3);
        let code = "fnf(){lettext=\"é//b\";}";
        assert_eq!(found.characters, code.chars().count());
    }

    #[test]
    fn code_for_tests_does_not_count() {
        let text = [
            "struct A;",
            "#[cfg(test)]",
            "mod tests {",
            "    // Why.",
            "    /// What.",
            "    fn f() { let g = |x| x; g(1).expect(\"\"); }",
            "}",
            "#[cfg(all(test, unix))]",
            "mod more;",
            "impl A { #[cfg(test)] pub fn f() {} }",
            "#[test] fn t() {}",
        ];
        let file = count(&text.join("\n")).unwrap();
        assert_eq!(file.test_modules, ["more"]);
        let expected = Counts {
            code_lines: 2,
            characters: "structA;implA{}".len(),
            types: 1,
            ..Counts::default()
        };
        assert_eq!(file.counts, expected);
    }

    #[test]
    fn lets_are_counted_by_what_they_bind() {
        let text = "fn f() {
            let closure = |x| x;
            let typed: fn() = || {};
            let (a, b) = (1, 2);
            let (c, d): (u8, u8) = (1, 2);
            let (e, g) = pair();
            let a = 1;
            let a = a + 1;
            { let a = 2; }
            #[cfg(unix)] let h = 1;
            #[cfg(windows)] let h = 2;
            run(|x| x);
        }";
        let found = counts(text);
        assert_eq!(found.let_closures, 2);
        assert_eq!(found.tuple_lets, 2);
        assert_eq!(found.repeated_lets, 1);
    }

    #[test]
    fn functions_types_and_public_items_are_counted() {
        let text = "
            pub struct A { pub field: u8 }
            pub(crate) enum B {}
            fn long(a: u8, b: u8, c: u8, d: u8, e: u8, f: u8) {}
            extern \"C\" fn fixed(a: u8, b: u8, c: u8, d: u8, e: u8, f: u8) {}
            extern \"C\" { fn foreign(); }
            impl A { pub fn of() -> A {} fn long(&self, b: u8, c: u8, d: u8, e: u8, f: u8) {} }
            trait T { fn of(self); }
            pub use a::B as C;
            fn inner() { struct A; }
        ";
        let file = count(text).unwrap();
        let expected = Counts {
            functions: 6,
            types: 3,
            public_items: 3,
            long_signatures: 2,
            of_constructors: 1,
            ..Counts::default()
        };
        let found = Counts {
            code_lines: 0,
            characters: 0,
            ..file.counts
        };
        assert_eq!(found, expected);
        assert_eq!(file.type_names, ["A", "B", "A"]);
        assert_eq!(repeated(&file.type_names), 1);
    }

    #[test]
    fn defaults_and_assertions_are_counted_also_inside_macros() {
        let text = "
            #[expect(unused)]
            fn f() {
                assert!(a.unwrap_or_default() == 0);
                let text = format!(\"{}\", a.expect(\"why\"));
                b.map(Option::unwrap_or_default);
                Option::unwrap_or_default(a);
                unreachable!()
            }
        ";
        let found = counts(text);
        assert_eq!(found.silent_defaults, 2);
        assert_eq!(found.assertions, 3);
    }

    #[test]
    fn a_wide_line_is_one_of_code() {
        let comment = format!("// {}", "x".repeat(MAX_WIDTH));
        let code = format!("const A: &str = \"{}\";", "x".repeat(MAX_WIDTH));
        assert_eq!(counts(&format!("{comment}\n{code}")).wide_lines, 1);
    }
}
