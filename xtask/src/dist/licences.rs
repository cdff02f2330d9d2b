//! The licences of everything that is linked, in one text. Crates share a text that differs in spaces and line ends alone.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use walkdir::WalkDir;

use super::system::Library;
use super::tree::Crates;
use crate::workspace::Workspace;

/// Beginnings of names of files with licences, in lower case.
const NAMES: &[&str] = &[
    "copying",
    "copyright",
    "licence",
    "license",
    "notice",
    "unlicense",
];
/// Files with these names are no licences, whatever they begin with.
const NOT_TEXTS: &[&str] = &["rs", "toml", "json", "py", "sh", "c", "h"];
/// How deep they are: in the crate's folder, or in a folder that is called after them.
const DEPTH: usize = 2;

/// The text.
///
/// # Errors
/// A file cannot be read.
pub(super) fn of(
    workspace: &Workspace,
    crates: &Crates,
    libraries: &[Library],
) -> anyhow::Result<String> {
    // By their words.
    let mut texts: BTreeMap<String, (Vec<String>, String)> = BTreeMap::new();
    let (mut list, mut lacking) = (String::new(), String::new());
    let mut add = |title: String, licence: &str, files: &[PathBuf]| -> anyhow::Result<()> {
        list.push_str(&format!("  {title}: {licence}\n"));
        if files.is_empty() {
            lacking.push_str(&format!("  {title}: {licence}\n"));
        }
        for file in files {
            let bytes = fs::read(file).with_context(|| format!("read {}", file.display()))?;
            let text = String::from_utf8_lossy(&bytes).replace("\r\n", "\n");
            let words: Vec<&str> = text.split_whitespace().collect();
            let (users, _) = texts
                .entry(words.join(" "))
                .or_insert_with(|| (Vec::new(), text.trim_matches('\n').trim_end().to_owned()));
            if users.last() != Some(&title) {
                users.push(title.clone());
            }
        }
        Ok(())
    };
    for ((name, version), one) in &crates.all {
        let folder = one.package.manifest_path.parent();
        let files = match (folder, &one.package.source) {
            (Some(folder), Some(_registry)) => in_crate(folder)?,
            _ => vec![workspace.path("LICENSE")],
        };
        let licence = one.package.license.as_deref().unwrap_or("see its text");
        add(format!("{name} {version}"), licence, &files)?;
    }
    for library in libraries {
        let title = format!("{} {}", library.name, library.version);
        add(title, library.licence, &library.texts)?;
    }
    let mut all = format!(
        "Adit is licensed under the Apache License 2.0. Its static binary holds:\n\n{list}\n"
    );
    if !lacking.is_empty() {
        all.push_str(&format!(
            "These come without a file of their licence:\n\n{lacking}\n"
        ));
    }
    // In the order of the first user, so that Adit's own comes first.
    let mut texts: Vec<(Vec<String>, String)> = texts.into_values().collect();
    texts.sort();
    for (users, text) in texts {
        let line = "=".repeat(80);
        all.push_str(&format!(
            "{line}\n{}\n{line}\n\n{text}\n\n",
            users.join(", ")
        ));
    }
    Ok(all)
}

/// Files of a crate that have licences.
fn in_crate(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let entries = WalkDir::new(folder)
        .max_depth(DEPTH)
        .sort_by_file_name()
        .into_iter()
        .filter_entry(|entry| {
            entry.depth() == 0 || !entry.file_type().is_dir() || is_named(entry.path())
        });
    for entry in entries {
        let entry = entry?;
        if entry.file_type().is_file() && is_text(entry.path(), entry.depth()) {
            found.push(entry.path().to_path_buf());
        }
    }
    Ok(found)
}

fn is_named(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = name.to_lowercase();
    NAMES.iter().any(|beginning| name.starts_with(beginning))
}

/// In a folder called after licences every text is one.
fn is_text(path: &Path, depth: usize) -> bool {
    let ending = path.extension().unwrap_or_default().to_string_lossy();
    !NOT_TEXTS.contains(&&*ending) && (depth > 1 || is_named(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licence_files_are_recognised_by_name() {
        for (path, depth, is) in [
            ("LICENSE-MIT", 1, true),
            ("Copyright.md", 1, true),
            ("license.rs", 1, false),
            ("README.md", 1, false),
            ("LICENSES/MIT.txt", 2, true),
        ] {
            assert_eq!(is_text(Path::new(path), depth), is, "{path}");
        }
    }
}
