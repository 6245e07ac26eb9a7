//! `cargo xtask tidy --report`: how plain and how large each package is, beside other projects. It
//! informs, and forbids nothing.

mod anchors;
mod counts;
mod rooms;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use self::anchors::{ANCHORS, COLUMNS};
use self::counts::Counts;
use self::rooms::Rooms;
use crate::files::{collect, read};
use crate::shell::show;

/// The directories that hold no product code, wherever they are.
const OUTSIDE: [&str; 6] = ["tests", "examples", "benches", "fuzz", "target", "src"];

/// One column of the tables.
struct Column {
    title: &'static str,
    count: fn(&Counts) -> usize,
    /// The number of code lines that a rate is given for.
    per: usize,
}

/// The columns of the table of sizes.
const SIZES: [Column; 9] = [
    column("code lines", |counts| counts.code_lines, 1),
    column("characters", |counts| counts.characters, 1),
    column("functions", |counts| counts.functions, 1),
    column("types", |counts| counts.types, 1),
    column("pub items", |counts| counts.public_items, 1),
    column("same type", |counts| counts.repeated_types, 1),
    column("`fn of`", |counts| counts.of_constructors, 1),
    column(">5 params", |counts| counts.long_signatures, 1),
    column("let f = |", |counts| counts.let_closures, 1),
];

/// The columns of the table of rates.
const RATES: [Column; COLUMNS] = [
    column("let f = |", |counts| counts.let_closures, 1000),
    column("tuple let", |counts| counts.tuple_lets, 1000),
    column("let again", |counts| counts.repeated_lets, 1000),
    column("> 100 col", |counts| counts.wide_lines, 1000),
    column(">5 params", |counts| counts.long_signatures, 1000),
    column("same type", |counts| counts.repeated_types, 1000),
    column("default()", |counts| counts.silent_defaults, 1000),
    column("asserted", |counts| counts.assertions, 1000),
    column("// /100", |counts| counts.comment_lines, 100),
    column("/// /100", |counts| counts.doc_lines, 100),
];

const fn column(title: &'static str, count: fn(&Counts) -> usize, per: usize) -> Column {
    Column { title, count, per }
}

/// Prints the counts of all packages in a directory, beside those of other projects. `files` are
/// the texts of all its files, by name.
pub(super) fn run(directory: &Path, files: &BTreeMap<String, String>) -> Result<()> {
    let mut packages = Vec::new();
    find_packages(directory, &mut packages)?;
    ensure!(
        !packages.is_empty(),
        "`{}` holds no package with a `src` folder",
        directory.display()
    );
    let mut rows = Vec::new();
    let mut total = Counts::default();
    for package in &packages {
        let counts = count_package(package)?;
        total.add(&counts);
        rows.push((package_name(directory, package), counts));
    }
    rows.push(("total".to_owned(), total));
    show("Code without tests, comments and white space:\n");
    show(&size_table(&rows));
    show("In 1000 code lines; comments, and doc comments, in 100:\n");
    show(&rate_table(&rows));
    show("Imports between the files and folders directly under `src`:\n");
    show(&room_table(directory, &packages, files)?);
    Ok(())
}

/// Returns the table of the rooms of all libraries under `crates` that have several.
fn room_table(
    directory: &Path,
    packages: &[PathBuf],
    files: &BTreeMap<String, String>,
) -> Result<String> {
    let mut table = "| crate | rooms | floors | arrows |\n|---|---|---|---|\n".to_owned();
    for package in packages {
        let name = package_name(directory, package);
        let source = format!("{name}/src");
        if !name.starts_with("crates/") || !files.contains_key(&format!("{source}/lib.rs")) {
            continue;
        }
        let rooms = Rooms::read(files, &source)?;
        if rooms.count < 2 {
            continue;
        }
        writeln!(
            table,
            "| `{}` | {} | {} | {} |",
            name.trim_start_matches("crates/"),
            rooms.count,
            rooms.floors,
            rooms.arrows
        )
        .expect("text can be written to a string");
    }
    Ok(table)
}

/// Returns the name of a package in the tables: its path below the directory that was asked for.
fn package_name(directory: &Path, package: &Path) -> String {
    let below = package.strip_prefix(directory).unwrap_or(package);
    if below.as_os_str().is_empty() {
        return ".".to_owned();
    }
    below.display().to_string()
}

/// Adds the directories of all packages at or below a directory, sorted.
fn find_packages(directory: &Path, packages: &mut Vec<PathBuf>) -> Result<()> {
    if directory.join("Cargo.toml").is_file() && directory.join("src").is_dir() {
        packages.push(directory.to_owned());
    }
    let mut below = Vec::new();
    for entry in fs::read_dir(directory)
        .with_context(|| format!("failed to list `{}`", directory.display()))?
    {
        let entry = entry?;
        let name = entry.file_name();
        let is_outside = OUTSIDE.iter().any(|outside| name == *outside);
        let is_hidden = name.to_string_lossy().starts_with('.');
        if entry.file_type()?.is_dir() && !is_outside && !is_hidden {
            below.push(entry.path());
        }
    }
    below.sort();
    for directory in below {
        find_packages(&directory, packages)?;
    }
    Ok(())
}

/// Counts the source files of a package, without the files of its modules for tests.
fn count_package(package: &Path) -> Result<Counts> {
    let mut files = Vec::new();
    collect(&package.join("src"), &mut files)?;
    let mut counted = BTreeMap::new();
    let mut test_files = Vec::new();
    for file in files {
        if file.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let found = counts::count(&read(&file)?)
            .with_context(|| format!("failed to parse `{}`", file.display()))?;
        // Where the files of the modules for tests are is known only from the files that declare
        // them, which may come later.
        let children = children_directory(&file);
        for module in &found.test_modules {
            test_files.push(children.join(format!("{module}.rs")));
            test_files.push(children.join(module));
        }
        counted.insert(file, found);
    }

    let mut total = Counts::default();
    let mut type_names = Vec::new();
    for (file, found) in counted {
        // A module for tests may have modules of its own, in a folder of its name.
        if test_files.iter().any(|tests| file.starts_with(tests)) {
            continue;
        }
        total.add(&found.counts);
        type_names.extend(found.type_names);
    }
    // One name may have two types of one file, or of two files.
    total.repeated_types = counts::repeated(&type_names);
    Ok(total)
}

/// Returns the directory of the files of a file's modules.
fn children_directory(file: &Path) -> PathBuf {
    let is_root = ["lib.rs", "main.rs", "mod.rs"]
        .iter()
        .any(|name| file.ends_with(name));
    if is_root {
        file.with_file_name("")
    } else {
        file.with_extension("")
    }
}

/// Returns the table of counts.
fn size_table(rows: &[(String, Counts)]) -> String {
    let mut text = heading(&SIZES);
    for (name, counts) in rows {
        let cells: Vec<String> = SIZES
            .iter()
            .map(|column| (column.count)(counts).to_string())
            .collect();
        push_row(&mut text, name, &cells);
    }
    text
}

/// Returns the table of counts in relation to the code lines, beside those of other projects.
fn rate_table(rows: &[(String, Counts)]) -> String {
    let mut text = heading(&RATES);
    for (name, counts) in rows {
        let cells: Vec<String> = RATES
            .iter()
            .map(|column| rate((column.count)(counts), column.per, counts.code_lines))
            .collect();
        push_row(&mut text, name, &cells);
    }
    for anchor in &ANCHORS {
        let name = format!("{} {}", anchor.name, anchor.revision);
        push_row(
            &mut text,
            &name,
            &anchor.rates.map(|rate| format!("{rate:.1}")),
        );
    }
    text
}

/// Returns a count in relation to the code lines, with one decimal.
fn rate(count: usize, per: usize, code_lines: usize) -> String {
    if code_lines == 0 {
        return "-".to_owned();
    }
    format!("{:.1}", (count * per) as f64 / code_lines as f64)
}

fn heading(columns: &[Column]) -> String {
    let titles: Vec<String> = columns
        .iter()
        .map(|column| column.title.to_owned())
        .collect();
    let mut text = String::new();
    push_row(&mut text, "", &titles);
    text
}

fn push_row(text: &mut String, name: &str, cells: &[String]) {
    write!(text, "{name:<24}").expect("a string takes all text");
    for cell in cells {
        write!(text, " {cell:>10}").expect("a string takes all text");
    }
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::write;

    fn write_all(directory: &Path, files: &[(&str, &str)]) {
        for (name, text) in files {
            let path = directory.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            write(&path, text).unwrap();
        }
    }

    #[test]
    fn files_of_modules_for_tests_do_not_count_and_names_are_compared_in_a_whole_package() {
        let directory = tempfile::tempdir().unwrap();
        let files = [
            ("Cargo.toml", ""),
            ("src/lib.rs", "mod a; #[cfg(test)] mod tests;"),
            ("src/tests.rs", "mod deep; fn f() {}"),
            ("src/tests/deep.rs", "fn f() {}"),
            ("src/a.rs", "struct A; #[cfg(test)] mod checks; mod b;"),
            ("src/a/checks.rs", "fn f() {}"),
            ("src/a/b.rs", "struct A; fn f() {}"),
        ];
        write_all(directory.path(), &files);
        let counts = count_package(directory.path()).unwrap();
        assert_eq!(counts.functions, 1);
        assert_eq!(counts.types, 2);
        assert_eq!(counts.repeated_types, 1);
    }

    #[test]
    fn packages_are_found_where_they_are_and_programs_of_tests_are_none() {
        let directory = tempfile::tempdir().unwrap();
        let files = [
            ("Cargo.toml", ""),
            ("crates/b/Cargo.toml", ""),
            ("crates/b/src/lib.rs", ""),
            ("crates/a/Cargo.toml", ""),
            ("crates/a/src/main.rs", ""),
            ("tests/Cargo.toml", ""),
            ("tests/src/lib.rs", ""),
        ];
        write_all(directory.path(), &files);
        let mut packages = Vec::new();
        find_packages(directory.path(), &mut packages).unwrap();
        let names: Vec<String> = packages
            .iter()
            .map(|package| package_name(directory.path(), package))
            .collect();
        assert_eq!(names, ["crates/a", "crates/b"]);
        assert_eq!(package_name(&packages[0], &packages[0]), ".");
    }

    #[test]
    fn rates_are_counts_in_relation_to_code_lines() {
        assert_eq!(rate(3, 1000, 2000), "1.5");
        assert_eq!(rate(0, 1000, 0), "-");
        let counts = Counts {
            code_lines: 200,
            let_closures: 1,
            comment_lines: 10,
            ..Counts::default()
        };
        let table = rate_table(&[("a".to_owned(), counts)]);
        assert_eq!(table.lines().count(), 2 + ANCHORS.len());
        let row: Vec<&str> = table.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(row[..2], ["a", "5.0"]);
        assert_eq!(row[9..], ["5.0", "0.0"]);
    }
}
