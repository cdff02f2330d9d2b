//! The addresses under which this repository is published. `Cargo.toml` has them, and `cargo xtask names` writes them everywhere
//! else, so that a fork changes one file.

use std::fs;

use anyhow::{Context as _, ensure};
use toml::Table;

use crate::workspace::Workspace;

const MANIFEST: &str = "Cargo.toml";
const CHART: &str = "deploy/chart/Chart.yaml";
const VALUES: &str = "deploy/chart/values.yaml";
/// Name of the image in the registry.
const IMAGE: &str = "adit";
/// Path of the icon below the home page.
const ICON: &str = "docs/icon.svg";
/// Folders whose files name images by address.
const NAMING: &[&str] = &["deploy", "docs"];

/// The addresses.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Names {
    /// A copy of this tree for readers.
    pub(crate) homepage: String,
    /// The sources.
    pub(crate) repository: String,
    /// The registry of the images, with a path if it has one.
    pub(crate) registry: String,
    version: String,
}

impl Names {
    /// What `Cargo.toml` says.
    ///
    /// # Errors
    /// A key is missing, or its value cannot be in all places.
    pub(crate) fn of(workspace: &Workspace) -> anyhow::Result<Self> {
        let manifest: Table = toml::from_str(&text(workspace, MANIFEST)?).context(MANIFEST)?;
        let get = |table: &str, key: &str| {
            let value = manifest
                .get("workspace")
                .and_then(|all| all.get(table)?.get(key)?.as_str());
            let value = value.with_context(|| format!("{MANIFEST}: no workspace.{table}.{key}"))?;
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "-._~:/".contains(c);
            ensure!(
                !value.is_empty() && value.chars().all(is_plain) && !value.ends_with('/'),
                "{MANIFEST}: workspace.{table}.{key} is {value:?}: write an address without spaces, quotes or a slash at its end"
            );
            Ok(value.to_owned())
        };
        Ok(Self {
            homepage: get("package", "homepage")?,
            repository: get("package", "repository")?,
            registry: get("metadata", "registry")?,
            version: get("package", "version")?,
        })
    }

    fn addresses(&self) -> [&str; 3] {
        [&self.homepage, &self.repository, &self.registry]
    }

    /// The lines of the chart that follow from them.
    fn of_chart(&self) -> [String; 6] {
        let Self {
            homepage,
            repository,
            registry,
            version,
        } = self;
        [
            format!("version: {version}"),
            format!("appVersion: \"{version}\""),
            format!("home: {homepage}"),
            format!("sources: [{repository}]"),
            format!("icon: {homepage}/{ICON}"),
            format!("      image: {registry}/{IMAGE}:{version}"),
        ]
    }
}

/// The addresses that were written last, as the chart has them.
fn written(workspace: &Workspace) -> anyhow::Result<[String; 3]> {
    let (chart, values) = (text(workspace, CHART)?, text(workspace, VALUES)?);
    let after = |text: &str, file: &str, key: &str| {
        let mut lines = text.lines();
        let value = lines.find_map(|line| line.trim_start().strip_prefix(key));
        let value = value.with_context(|| format!("{file} has no line `{key}`"))?;
        anyhow::Ok(value.trim().trim_matches(['[', ']']).to_owned())
    };
    let image = after(&values, VALUES, "repository:")?;
    let registry = image.strip_suffix(&format!("/{IMAGE}"));
    Ok([
        after(&chart, CHART, "home:")?,
        after(&chart, CHART, "sources:")?,
        registry
            .with_context(|| format!("{VALUES}: the image {image} is not called {IMAGE}"))?
            .to_owned(),
    ])
}

/// Writes the addresses of `Cargo.toml` in place of those that were written last.
///
/// # Errors
/// A file cannot be read or written.
pub(crate) fn run(workspace: &Workspace) -> anyhow::Result<()> {
    let (names, old) = (Names::of(workspace)?, written(workspace)?);
    let pairs: Vec<(&str, &str)> = old
        .iter()
        .map(String::as_str)
        .zip(names.addresses())
        .collect();
    for file in workspace.files(".")? {
        if file == MANIFEST {
            continue;
        }
        let Some(text) = workspace.text(&file)? else {
            continue;
        };
        let replaced = replace(&text, &pairs);
        if replaced != text {
            fs::write(workspace.path(&file), replaced).with_context(|| format!("write {file}"))?;
            println!("names: {file}");
        }
    }
    Ok(())
}

/// Replaces all in one pass, the longest that fits first: one address may contain another, old or new.
fn replace(text: &str, pairs: &[(&str, &str)]) -> String {
    let (mut out, mut rest) = (String::new(), text);
    while let Some(first) = rest.chars().next() {
        let fitting = pairs.iter().filter(|(old, _)| rest.starts_with(*old));
        if let Some((old, new)) = fitting.max_by_key(|(old, _)| old.len()) {
            out.push_str(new);
            rest = &rest[old.len()..];
        } else {
            out.push(first);
            rest = &rest[first.len_utf8()..];
        }
    }
    out
}

/// Places with another address than `Cargo.toml`'s.
///
/// # Errors
/// A file cannot be read.
pub(crate) fn check(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    if !workspace.path(CHART).exists() {
        return Ok(Vec::new());
    }
    let names = Names::of(workspace)?;
    if written(workspace)? != names.addresses() {
        return Ok(vec![format!(
            "{CHART} and {VALUES} have other addresses than {MANIFEST}: run `cargo xtask names`, then `cargo xtask chart`"
        )]);
    }
    let mut findings = Vec::new();
    let chart = text(workspace, CHART)?;
    for line in names.of_chart() {
        if !chart.lines().any(|one| one == line) {
            findings.push(format!("{CHART}: no line `{line}`"));
        }
    }
    if !workspace.path(ICON).exists() {
        findings.push(format!("{ICON} is not there, which {CHART} names"));
    }
    for file in NAMING {
        for file in workspace.files(file)? {
            let text = workspace.text(&file)?.unwrap_or_default();
            for (number, line) in (1..).zip(text.lines()) {
                for registry in registries(line).filter(|one| *one != names.registry) {
                    findings.push(format!(
                        "{file}:{number}: an image of {registry}, where {MANIFEST} has {}",
                        names.registry
                    ));
                }
            }
        }
    }
    Ok(findings)
}

/// Registries of our images in a line: what stands before `/adit:1` or `/adit-NAME:1`.
fn registries(line: &str) -> impl Iterator<Item = &str> {
    let mark = format!("/{IMAGE}");
    let starts: Vec<usize> = line.match_indices(&mark).map(|(at, _)| at).collect();
    starts.into_iter().filter_map(move |at| {
        let (before, name) = line.split_at(at);
        let name = name.strip_prefix(&mark)?;
        let name = name.trim_start_matches(|c: char| c.is_ascii_lowercase() || c == '-');
        let tag = name.strip_prefix(':')?;
        tag.starts_with(|c: char| c.is_ascii_digit())
            .then_some(())?;
        let is_part = |c: char| c.is_ascii_alphanumeric() || "-._:/".contains(c);
        let start = before.trim_end_matches(is_part).len();
        let registry = before.get(start..)?;
        Some(
            registry
                .rsplit_once("//")
                .map_or(registry, |(_, rest)| rest),
        )
    })
}

fn text(workspace: &Workspace, file: &str) -> anyhow::Result<String> {
    let text = workspace.text(file)?;
    text.with_context(|| format!("{file} is no text"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sample;

    const FORK: &str = "[workspace.package]\nversion = \"0.2.0\"\nhomepage = \"https://fork.test/docs\"\n\
        repository = \"https://fork.test/git\"\n[workspace.metadata]\nregistry = \"images.test/fork\"\n";
    const OLD: &str = "version: 0.2.0\nappVersion: \"0.2.0\"\nhome: https://old.test/adit\nsources: [https://old.test/adit.git]\n\
        icon: https://old.test/adit/docs/icon.svg\n    - name: adit\n      image: old.test/adit:0.2.0\n";

    #[test]
    fn a_fork_changes_one_file_and_a_command_writes_the_rest() {
        let (_folder, workspace) = sample(&[
            (MANIFEST, FORK),
            (CHART, OLD),
            (VALUES, "image:\n  repository: old.test/adit\n"),
            (ICON, "<svg/>"),
            (
                "docs/a.md",
                "`old.test/adit:0.2.0` of <https://old.test/adit.git>\n",
            ),
        ]);
        let stale = check(&workspace).unwrap();
        assert!(stale.len() == 1 && stale[0].contains("cargo xtask names"));
        run(&workspace).unwrap();
        assert_eq!(check(&workspace).unwrap(), [""; 0]);
        let text = |file: &str| text(&workspace, file).unwrap();
        assert_eq!(
            text("docs/a.md"),
            "`images.test/fork/adit:0.2.0` of <https://fork.test/git>\n"
        );
        assert!(text(CHART).contains("\nicon: https://fork.test/docs/docs/icon.svg\n"));
        assert_eq!(text(MANIFEST), FORK);
        // A page that is written later with another registry is found.
        let page = workspace.path("docs/b.md");
        fs::write(page, "docker://old.test/adit-shell:0.2.0\n").unwrap();
        let found = check(&workspace).unwrap();
        assert_eq!(
            found,
            ["docs/b.md:1: an image of old.test, where Cargo.toml has images.test/fork"]
        );
    }

    #[test]
    fn registries_are_told_from_paths() {
        let of = |line| registries(line).map(str::to_owned).collect::<Vec<_>>();
        for line in [
            "/adit",
            "usr/bin/adit: a",
            "see /docs/adit-core:x",
            "(/adit/a:1)",
        ] {
            assert_eq!(of(line), [""; 0], "{line}");
        }
        assert_eq!(of("image:.*a.test:5000/b/adit:0.1.0|c"), ["a.test:5000/b"]);
        assert_eq!(of("\"x://a/adit-shell:1\" 'b/adit:2'"), ["a", "b"]);
    }

    #[test]
    fn an_address_with_a_space_is_refused() {
        let bad = FORK.replace("images.test/fork", "images.test/ fork");
        let (_folder, workspace) = sample(&[(MANIFEST, &bad)]);
        let error = Names::of(&workspace).unwrap_err().to_string();
        assert!(error.contains("workspace.metadata.registry"), "{error}");
    }
}
