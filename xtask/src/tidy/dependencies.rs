//! No unused dependency: some member uses each shared version, and a member's sources name each of its dependencies.

use std::collections::BTreeSet;

use anyhow::Context as _;
use toml::Table;

use crate::workspace::Workspace;

/// Folders of packages that build apart from the workspace.
const APART: &[&str] = &["tunnel-daemon/fuzz/", "ebpf-programs/programs/"];

/// Checks all manifests of the workspace.
///
/// # Errors
/// A manifest or source cannot be read.
pub(super) fn check(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let mut files = workspace.files(".")?;
    files.retain(|file| !APART.iter().any(|apart| file.starts_with(apart)));
    let manifests = files.iter().filter(|file| file.ends_with("/Cargo.toml"));
    let packages: Vec<&str> = manifests
        .filter_map(|file| file.strip_suffix("Cargo.toml"))
        .collect();
    let mut sources = vec![String::new(); packages.len()];
    for file in files.iter().filter(|file| file.ends_with(".rs")) {
        // The innermost package folder that contains the file.
        let owners = packages.iter().enumerate();
        let owners = owners.filter(|(_, package)| file.starts_with(*package));
        if let Some((at, _)) = owners.max_by_key(|(_, package)| package.len()) {
            sources[at].push_str(&workspace.text(file)?.unwrap_or_default());
        }
    }
    let (mut findings, mut asked) = (Vec::new(), BTreeSet::new());
    for (package, source) in packages.iter().zip(&sources) {
        let file = format!("{package}Cargo.toml");
        for name in dependencies(&manifest(workspace, &file)?) {
            if !names_word(source, &name.replace('-', "_")) {
                findings.push(format!(
                    "{file}: `{name}` is named by no source of the package"
                ));
            }
            asked.insert(name);
        }
    }
    let top = manifest(workspace, "Cargo.toml")?;
    let shared = top
        .get("workspace")
        .and_then(|workspace| workspace.get("dependencies"));
    for name in shared
        .and_then(|all| all.as_table())
        .into_iter()
        .flat_map(Table::keys)
    {
        if !asked.contains(name) {
            findings.push(format!(
                "Cargo.toml: no member uses the workspace dependency `{name}`"
            ));
        }
    }
    Ok(findings)
}

fn manifest(workspace: &Workspace, file: &str) -> anyhow::Result<Table> {
    let text = workspace.text(file)?.unwrap_or_default();
    toml::from_str(&text).with_context(|| format!("in {file}"))
}

/// Names of all dependencies, including those of single targets.
fn dependencies(manifest: &Table) -> BTreeSet<String> {
    let targets = manifest
        .get("target")
        .and_then(|targets| targets.as_table());
    let targets = targets.into_iter().flat_map(Table::values);
    let tables = targets.filter_map(|target| target.as_table());
    let sections = tables.chain([manifest]).flatten();
    let sections = sections.filter(|(name, _)| name.ends_with("dependencies"));
    let names = sections.filter_map(|(_, section)| section.as_table());
    names.flat_map(Table::keys).cloned().collect()
}

/// Whether a word occurs outside comments.
fn names_word(source: &str, word: &str) -> bool {
    let lines = source
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    lines
        .into_iter()
        .any(|line| line.split(|c| !is_word(c)).any(|one| one == word))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sample;

    #[test]
    fn unused_dependencies_are_found() {
        let (_folder, workspace) = sample(&[
            (
                "Cargo.toml",
                "[workspace.dependencies]\nbytes = \"1\"\nlibc = \"1\"\ntokio-util = \"0.7\"\n",
            ),
            (
                "a/Cargo.toml",
                "[dependencies]\nbytes.workspace = true\n[target.'cfg(unix)'.dev-dependencies]\ntokio-util = { workspace = true }\n",
            ),
            ("a/src/lib.rs", "// bytes::Bytes\nuse tokio_util::task;"),
            // An inner package does not speak for the outer.
            (
                "a/core/Cargo.toml",
                "[dependencies.bytes]\nworkspace = true\n",
            ),
            ("a/core/src/lib.rs", "use bytes::Bytes;"),
        ]);
        assert_eq!(
            check(&workspace).unwrap(),
            [
                "a/Cargo.toml: `bytes` is named by no source of the package",
                "Cargo.toml: no member uses the workspace dependency `libc`"
            ]
        );
    }
}
