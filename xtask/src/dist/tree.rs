//! Which crates are linked into `adit`, by cargo's own tree of features and target.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use serde::Deserialize;

use super::{Arch, Package, TOOL};
use crate::steps::stdout_of;
use crate::workspace::Workspace;

/// The package that is built.
pub(super) const ROOT: &str = "adit";
/// The default feature that images and packages leave out.
const LEFT_OUT: &str = "demo";

/// A crate, by name and version: no two sources have the same.
pub(super) type Id = (String, String);

/// One that is linked.
#[derive(Debug)]
pub(super) struct Crate {
    pub(super) package: Package,
    /// SHA-256 of the archive in the registry; ours have none.
    pub(super) checksum: Option<String>,
    pub(super) uses: BTreeSet<Id>,
}

/// All of them.
#[derive(Debug)]
pub(super) struct Crates {
    pub(super) all: BTreeMap<Id, Crate>,
    /// The features that `adit` is built with.
    pub(super) features: Vec<String>,
    /// Where cargo has unpacked crates of registries.
    pub(super) registries: BTreeSet<PathBuf>,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Lock {
    package: Vec<Locked>,
}

#[derive(Deserialize)]
struct Locked {
    name: String,
    version: String,
    checksum: Option<String>,
}

impl Crates {
    /// Asks cargo. Build scripts and macros are not linked.
    ///
    /// # Errors
    /// Cargo fails, or its answers do not fit together.
    pub(super) fn linked(workspace: &Workspace, arch: Arch) -> anyhow::Result<Self> {
        let mut metadata = workspace.cargo(&["metadata", "--locked", "--format-version=1"]);
        metadata.args(["--filter-platform", &arch.triple()]);
        let metadata: Metadata = serde_json::from_str(&stdout_of(&mut metadata, TOOL)?)
            .context("read the answer of cargo metadata")?;
        let lock: Lock = toml::from_str(&workspace.text("Cargo.lock")?.unwrap_or_default())?;
        let mut checksums: BTreeMap<Id, String> = lock
            .package
            .into_iter()
            .filter_map(|locked| Some(((locked.name, locked.version), locked.checksum?)))
            .collect();
        let registries = metadata.packages.iter().filter(|one| one.source.is_some());
        let registries = registries
            .filter_map(|one| Some(one.manifest_path.parent()?.parent()?.to_path_buf()))
            .collect();
        let root = metadata.packages.iter().find(|one| one.name == ROOT);
        let features = installed(&root.context("no package is named adit")?.features);
        let mut packages: BTreeMap<Id, Package> = metadata
            .packages
            .into_iter()
            .map(|one| ((one.name.clone(), one.version.clone()), one))
            .collect();
        let mut tree = workspace.cargo(&["tree", "--locked", "--package", ROOT]);
        tree.args(["--edges=normal,no-proc-macro", "--prefix=depth"])
            .args(["--charset=ascii", "--format= {p}", "--no-default-features"])
            .args(["--features", &features.join(",")])
            .args(["--target", &arch.triple()]);
        let edges = edges(&stdout_of(&mut tree, TOOL)?)?;
        let mut all = BTreeMap::new();
        for (id, uses) in edges {
            let (name, version) = &id;
            let package = packages
                .remove(&id)
                .with_context(|| format!("cargo metadata does not have {name} {version}"))?;
            let checksum = checksums.remove(&id);
            ensure!(
                checksum.is_some() || package.source.is_none(),
                "Cargo.lock has no checksum of {name} {version}"
            );
            all.insert(
                id,
                Crate {
                    package,
                    checksum,
                    uses,
                },
            );
        }
        Ok(Self {
            all,
            features,
            registries,
        })
    }
}

/// Default features but the one that is left out.
fn installed(features: &BTreeMap<String, Vec<String>>) -> Vec<String> {
    let default = features.get("default").into_iter().flatten();
    default.filter(|one| *one != LEFT_OUT).cloned().collect()
}

/// Reads a tree with the depth before each crate, such as `2 bytes v1.12.1`.
fn edges(tree: &str) -> anyhow::Result<BTreeMap<Id, BTreeSet<Id>>> {
    let mut all: BTreeMap<Id, BTreeSet<Id>> = BTreeMap::new();
    let mut above: Vec<Id> = Vec::new();
    for line in tree.lines().filter(|line| !line.is_empty()) {
        let mut words = line.split(' ');
        let depth = words.next().and_then(|word| word.parse::<usize>().ok());
        let name = words.next();
        let version = words.next().and_then(|word| word.strip_prefix('v'));
        let (Some(depth), Some(name), Some(version)) = (depth, name, version) else {
            anyhow::bail!("cargo tree has the line {line:?}");
        };
        let id = (name.to_owned(), version.to_owned());
        above.truncate(depth);
        if let Some(parent) = above.last() {
            all.entry(parent.clone()).or_default().insert(id.clone());
        }
        all.entry(id.clone()).or_default();
        above.push(id);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(name: &str) -> Id {
        (name.to_owned(), "1.0.0".to_owned())
    }

    #[test]
    fn a_tree_with_depths_is_read_as_edges() {
        let tree = "0 a v1.0.0 (/somewhere)\n1 b v1.0.0\n2 c v1.0.0\n1 d v1.0.0\n2 b v1.0.0 (*)\n";
        let edges = edges(tree).unwrap();
        assert_eq!(edges[&id("a")], BTreeSet::from([id("b"), id("d")]));
        assert_eq!(edges[&id("b")], BTreeSet::from([id("c")]));
        assert_eq!(edges[&id("d")], BTreeSet::from([id("b")]));
        assert!(edges[&id("c")].is_empty());
    }

    #[test]
    fn only_the_demo_is_excluded_from_default_features() {
        let features = BTreeMap::from([(
            "default".to_owned(),
            vec!["demo".to_owned(), "ebpf".to_owned()],
        )]);
        assert_eq!(installed(&features), ["ebpf"]);
    }
}
