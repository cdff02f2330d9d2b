//! No dependency without a use: every shared version has a member that asks for it, and every member's
//! dependency is named by its sources.

use std::collections::BTreeSet;
use std::path::Path;

use crate::tidy::paths::paths;
use crate::workspace::Workspace;

/// Dependencies that no source names: package folder, dependency, reason.
const UNNAMED: &[(&str, &str, &str)] = &[];

/// Folders of packages that build apart from the workspace.
const APART: &[&str] = &["tunnel-daemon/fuzz", "ebpf-programs"];

/// Checks all manifests of the workspace.
///
/// # Errors
/// When a manifest or source cannot be read.
pub(super) fn check(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let files = workspace.files(".")?;
    let packages: Vec<&str> = files
        .iter()
        .filter_map(|file| file.strip_suffix("/Cargo.toml"))
        .filter(|folder| {
            !APART
                .iter()
                .any(|apart| Path::new(folder).starts_with(apart))
        })
        .collect();

    let mut findings = Vec::new();
    let mut asked = BTreeSet::new();
    for package in &packages {
        let manifest = workspace
            .text(&format!("{package}/Cargo.toml"))?
            .unwrap_or_default();
        let named = identifiers(workspace, package, &packages, &files)?;
        for (section, name) in entries(&manifest) {
            if !section.ends_with("dependencies") {
                continue;
            }
            let excused = UNNAMED
                .iter()
                .any(|(folder, dependency, _)| folder == package && *dependency == name);
            if !named.contains(&name.replace('-', "_")) && !excused {
                findings.push(format!(
                    "{package}/Cargo.toml: `{name}` is named by no source of the package"
                ));
            }
            asked.insert(name);
        }
    }
    let top = workspace.text("Cargo.toml")?.unwrap_or_default();
    for (section, name) in entries(&top) {
        if section == "workspace.dependencies" && !asked.contains(&name) {
            findings.push(format!(
                "Cargo.toml: no member uses the workspace dependency `{name}`"
            ));
        }
    }
    Ok(findings)
}

/// Section and key of each entry; `[dependencies.name]` counts as an entry of `dependencies`.
fn entries(manifest: &str) -> Vec<(String, String)> {
    let mut section = String::new();
    let mut found = Vec::new();
    for line in manifest.lines() {
        let line = line.trim_end();
        if let Some(header) = line
            .strip_prefix('[')
            .and_then(|rest| rest.split(']').next())
        {
            section = header.trim_matches('[').to_owned();
            if let Some((table, name)) = section.rsplit_once("dependencies.") {
                found.push((format!("{table}dependencies"), name.to_owned()));
            }
        } else if line.starts_with(|first: char| first.is_ascii_alphanumeric()) {
            let name = line.split(['.', '=', ' ']).next().unwrap_or_default();
            found.push((section.clone(), name.to_owned()));
        }
    }
    found
}

/// Every identifier in the sources of one package, without the packages inside its folder.
fn identifiers(
    workspace: &Workspace,
    package: &str,
    packages: &[&str],
    files: &[String],
) -> anyhow::Result<BTreeSet<String>> {
    let belongs = |file: &Path| {
        let inner = |other: &&str| {
            *other != package && other.starts_with(package) && file.starts_with(other)
        };
        file.starts_with(package)
            && !packages.iter().any(inner)
            && !APART.iter().any(|apart| file.starts_with(apart))
    };
    let mut named = BTreeSet::new();
    for file in files
        .iter()
        .filter(|file| file.ends_with(".rs") && belongs(Path::new(file.as_str())))
    {
        let text = workspace.text(file)?.unwrap_or_default();
        for path in paths(&text).map_err(|error| error.context(file.clone()))? {
            named.extend(path.segments);
        }
    }
    Ok(named)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sample;

    const TOP: &str =
        "[workspace.dependencies]\nbytes = \"1\"\ntokio-util = { version = \"0.7\" }\n";

    #[test]
    fn dependency_nobody_asks_for_is_found() {
        let (_folder, workspace) = sample(&[
            ("Cargo.toml", TOP),
            ("a/Cargo.toml", "[dependencies]\nbytes.workspace = true\n"),
            ("a/src/lib.rs", "use bytes::Bytes;"),
        ]);
        let findings = check(&workspace).unwrap();
        assert_eq!(
            findings,
            ["Cargo.toml: no member uses the workspace dependency `tokio-util`"]
        );
    }

    #[test]
    fn dependency_that_no_source_names_is_found() {
        let (_folder, workspace) = sample(&[
            ("Cargo.toml", TOP),
            (
                "a/Cargo.toml",
                "[dependencies]\nbytes.workspace = true\ntokio-util = { workspace = true }\n",
            ),
            ("a/src/lib.rs", "// bytes::Bytes\nuse tokio_util::task;"),
        ]);
        let findings = check(&workspace).unwrap();
        assert_eq!(
            findings,
            ["a/Cargo.toml: `bytes` is named by no source of the package"]
        );
    }

    #[test]
    fn inner_package_does_not_speak_for_the_outer() {
        let (_folder, workspace) = sample(&[
            ("Cargo.toml", "[workspace.dependencies]\nbytes = \"1\"\n"),
            ("a/Cargo.toml", "[dependencies]\nbytes.workspace = true\n"),
            ("a/src/lib.rs", ""),
            (
                "a/core/Cargo.toml",
                "[dependencies.bytes]\nworkspace = true\n",
            ),
            ("a/core/src/lib.rs", "use bytes::Bytes;"),
        ]);
        assert_eq!(check(&workspace).unwrap().len(), 1);
    }
}
