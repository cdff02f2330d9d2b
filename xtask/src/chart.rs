//! `cargo xtask chart`: the Helm chart below `deploy/chart`, and what is made from it: the table of values in its README and the
//! manifests below `deploy/manifests`.
//!
//! Each file of `deploy/chart/ci` is a combination of values that must pass, each file of `ci/fail` one that must fail with the text
//! it names. Helm itself is built from its Go module.

mod values;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};

use crate::steps::{MINUTES_5, Outcome, go, go_toolchain, output_of, run_command};
use crate::workspace::{Workspace, fresh};

/// The chart.
const CHART: &str = "deploy/chart";
/// Values that pass, and below `fail` those that must not.
const CASES: &str = "deploy/chart/ci";
/// Below a folder, where renderings are written.
const RENDERED: &str = "rendered";
/// What is rendered for people without Helm, and `templates` for what is no object of the chart.
const MANIFESTS: &str = "deploy/manifests";
/// Where the Go module is that names Helm's version.
const MODULE: &str = "xtask/helm";
/// What is built of it.
const PACKAGE: &str = "helm.sh/helm/v3/cmd/helm";
/// The oldest Kubernetes that the chart is for.
const KUBERNETES: &str = "1.30.0";
/// Longest time to build Helm from nothing, or the test of command lines.
const BUILD: Duration = Duration::from_secs(30 * 60);
/// Lines of Helm's own that plain manifests do without.
const HELMS: &[&str] = &[
    "# Source: ",
    "helm.sh/chart: ",
    "app.kubernetes.io/managed-by: ",
];

/// What to do with the files that are made.
#[derive(clap::Args, Clone, Copy)]
pub(crate) struct Args {
    /// Compare them with what the chart says now, and write nothing.
    #[arg(long)]
    pub(crate) check: bool,
}

/// Packs the chart into a folder.
///
/// # Errors
/// Helm cannot be built, or refuses the chart.
pub(crate) fn package(workspace: &Workspace, out: &Path) -> anyhow::Result<Outcome> {
    if let Err(why) = go_toolchain() {
        return Ok(Outcome::Skipped(why));
    }
    let helm = Helm::build(workspace, &workspace.target().join("chart"))?;
    let mut command = Command::new(&helm.program);
    command.current_dir(workspace.root());
    command.args(["package", CHART, "--destination"]).arg(out);
    run_command(&mut command, MINUTES_5)?;
    Ok(Outcome::Done)
}

/// Builds Helm into a folder, and renders all combinations that must pass into its folder `rendered`.
///
/// # Errors
/// Helm cannot be built, or refuses a combination.
pub(crate) fn render(workspace: &Workspace, folder: &Path) -> anyhow::Result<()> {
    let helm = Helm::build(workspace, folder)?;
    render_all(workspace, &helm, &folder.join(RENDERED))?;
    Ok(())
}

/// Lints and renders the chart with all values, and writes or compares what is made from it.
///
/// # Errors
/// A combination does not do what it should, a command line of a rendering is none of `adit`'s, or a file differs.
pub(crate) fn run(workspace: &Workspace, args: Args) -> anyhow::Result<Outcome> {
    let page = values::readme(workspace)?;
    keep(workspace, args, values::README, &page)?;
    values::matches_schema(workspace)?;
    if let Err(why) = go_toolchain() {
        return Ok(Outcome::Skipped(why));
    }
    let folder = workspace.target().join("chart");
    let helm = Helm::build(workspace, &folder)?;
    let rendered = folder.join(RENDERED);
    let cases = render_all(workspace, &helm, &rendered)?;
    for (case, text) in &cases {
        contains_files(workspace, case, text).with_context(|| case.file.clone())?;
        if case.is_manifest {
            let path = format!("{MANIFESTS}/{}", case.manifest());
            keep(workspace, args, &path, &case.plain(text))?;
        }
    }
    let failing = Case::all(workspace, &format!("{CASES}/fail"))?;
    for case in &failing {
        helm.fails(case).with_context(|| case.file.clone())?;
    }
    println!(
        "chart: {} combinations pass, {} fail as they should",
        cases.len(),
        failing.len()
    );
    command_lines(workspace, &rendered)?;
    Ok(Outcome::Done)
}

/// Writes the renderings of all combinations that must pass into a fresh folder, and returns them.
fn render_all(
    workspace: &Workspace,
    helm: &Helm,
    rendered: &Path,
) -> anyhow::Result<Vec<(Case, String)>> {
    fresh(rendered)?;
    let mut cases = Vec::new();
    for case in Case::all(workspace, CASES)? {
        let text = helm.passes(&case).with_context(|| case.file.clone())?;
        fs::write(rendered.join(case.manifest()), &text)?;
        cases.push((case, text));
    }
    Ok(cases)
}

/// The chart leaves out an object whose file is missing, so the rendering itself must show that the file is there.
fn contains_files(workspace: &Workspace, case: &Case, rendered: &str) -> anyhow::Result<()> {
    let rendered = without_indent(rendered);
    for name in &case.has {
        let text = workspace.text(name)?.unwrap_or_default();
        let text = without_indent(&text);
        ensure!(
            !text.is_empty() && rendered.contains(&text),
            "the rendering does not contain {name}"
        );
    }
    Ok(())
}

/// Its lines without indent, and without blank ones.
fn without_indent(text: &str) -> String {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.flat_map(|line| [line, "\n"]).collect()
}

/// Has `adit` read the command lines of all renderings.
fn command_lines(workspace: &Workspace, rendered: &Path) -> anyhow::Result<()> {
    let mut test = workspace.cargo(&["test", "--quiet", "--package=adit-config"]);
    test.arg("--test=manifests").env("ADIT_MANIFESTS", rendered);
    run_command(&mut test, BUILD)
}

/// Writes a file, or compares it.
fn keep(workspace: &Workspace, args: Args, path: &str, text: &str) -> anyhow::Result<()> {
    let file = workspace.path(path);
    if args.check {
        let before = fs::read_to_string(&file).unwrap_or_default();
        ensure!(
            before == text,
            "{path} is not what the chart says: `cargo xtask chart` writes it anew"
        );
        return Ok(());
    }
    fs::write(&file, text).with_context(|| format!("write {path}"))
}

/// Copies all files below a folder.
fn copy(workspace: &Workspace, from: &str, to: &Path) -> anyhow::Result<()> {
    for file in workspace.files(from)? {
        let name = file.strip_prefix(&format!("{from}/")).unwrap_or(&file);
        let target = to.join(name);
        fs::create_dir_all(target.parent().context("a file has a folder")?)?;
        fs::copy(workspace.path(&file), target)?;
    }
    Ok(())
}

/// Values with what is to come of them. Comments at the top of the file say it: `# namespace: NAME`, `# manifest`,
/// `# template: FILE`, `# has: FILE`, `# fails: TEXT`. Others describe the combination.
#[derive(Debug, Default, PartialEq, Eq)]
struct Case {
    /// Below the root.
    file: String,
    namespace: String,
    /// Whether the rendering is kept.
    is_manifest: bool,
    /// The only template to render, one of `deploy/manifests/templates`.
    template: Option<String>,
    /// Files below the root that the rendering must contain, at any indent.
    has: Vec<String>,
    /// Part of the message.
    fails: Option<String>,
    about: Vec<String>,
}

impl Case {
    fn all(workspace: &Workspace, folder: &str) -> anyhow::Result<Vec<Self>> {
        let files = workspace.files(folder)?;
        let is_here = |file: &&String| {
            let name = file.strip_prefix(&format!("{folder}/"));
            name.is_some_and(|name| name.ends_with(".yaml") && !name.contains('/'))
        };
        let files = files.iter().filter(is_here);
        let read = |file: &String| {
            let text = workspace.text(file)?.unwrap_or_default();
            Ok(Self::of(file, &text))
        };
        let cases: Vec<Self> = files.map(read).collect::<anyhow::Result<_>>()?;
        ensure!(!cases.is_empty(), "{folder} has no values");
        Ok(cases)
    }

    fn of(file: &str, text: &str) -> Self {
        let mut case = Self {
            file: file.to_owned(),
            namespace: "kube-system".to_owned(),
            ..Self::default()
        };
        for line in text.lines().map_while(|line| line.strip_prefix("# ")) {
            match line.split_once(": ") {
                Some(("namespace", name)) => name.clone_into(&mut case.namespace),
                Some(("template", name)) => case.template = Some(name.to_owned()),
                Some(("has", name)) => case.has.push(name.to_owned()),
                Some(("fails", text)) => case.fails = Some(text.to_owned()),
                _ if line == "manifest" => case.is_manifest = true,
                _ => case.about.push(line.to_owned()),
            }
        }
        case
    }

    /// Name of its manifest.
    fn manifest(&self) -> &str {
        self.file.rsplit('/').next().unwrap_or(&self.file)
    }

    /// The rendering for people without Helm.
    fn plain(&self, rendered: &str) -> String {
        let mut text = String::new();
        for line in &self.about {
            text.push_str("# ");
            text.push_str(line);
            text.push('\n');
        }
        text.push_str(&format!(
            "# `cargo xtask chart` writes this file from {}.\n",
            self.file
        ));
        let is_helms = |line: &&str| {
            let line = line.trim_start();
            HELMS.iter().any(|start| line.starts_with(start))
        };
        for line in rendered.lines().filter(|line| !is_helms(line)) {
            text.push_str(line);
            text.push('\n');
        }
        text
    }
}

/// Helm, the repository, and a copy of the chart with the templates of manifests.
struct Helm {
    program: PathBuf,
    root: PathBuf,
    with_templates: PathBuf,
}

impl Helm {
    /// Go knows itself what is to be built anew.
    fn build(workspace: &Workspace, folder: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(folder)?;
        println!("chart: building helm");
        let program = folder.join("helm");
        let mut go = go()?;
        go.current_dir(workspace.path(MODULE))
            .args(["build", "-trimpath", "-ldflags=-s -w", "-o"])
            .arg(&program)
            .arg(PACKAGE);
        run_command(&mut go, BUILD)?;
        let with_templates = folder.join("with-templates");
        fresh(&with_templates)?;
        copy(workspace, CHART, &with_templates)?;
        let templates = format!("{MANIFESTS}/templates");
        copy(workspace, &templates, &with_templates.join("templates"))?;
        Ok(Self {
            program,
            root: workspace.root().to_path_buf(),
            with_templates,
        })
    }

    fn command(&self, of: &str, case: &Case) -> Command {
        let mut command = Command::new(&self.program);
        // Nothing of a cluster or of the user's own Helm.
        command.env("KUBECONFIG", "/dev/null").arg(of);
        if of == "template" {
            command.arg("adit");
        }
        // Templates of manifests are no objects of a release, so only the chart itself is linted.
        match case.template {
            Some(_) if of == "template" => command.arg(&self.with_templates),
            _ => command.arg(self.root.join(CHART)),
        };
        command
            .args(["--kube-version", KUBERNETES, "--namespace"])
            .arg(&case.namespace)
            .arg("--values")
            .arg(self.root.join(&case.file));
        command
    }

    /// The rendering of a combination that lint and templates accept.
    fn passes(&self, case: &Case) -> anyhow::Result<String> {
        let mut lint = self.command("lint", case);
        output_of(lint.arg("--strict"), MINUTES_5)?;
        let mut template = self.command("template", case);
        if let Some(name) = &case.template {
            template.arg("--show-only").arg(format!("templates/{name}"));
        }
        let output = output_of(&mut template, MINUTES_5)?;
        Ok(output.stdout)
    }

    fn fails(&self, case: &Case) -> anyhow::Result<()> {
        let Some(expected) = &case.fails else {
            bail!("it has no line `# fails: TEXT`");
        };
        let mut template = self.command("template", case);
        match output_of(&mut template, MINUTES_5) {
            Ok(_rendered) => bail!("it renders, and should fail with: {expected}"),
            Err(error) => {
                let text = format!("{error:#}");
                ensure!(
                    text.contains(expected),
                    "it should fail with: {expected}\nbut fails with: {text}"
                );
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leading_comments_configure_the_case() {
        let text = "# namespace: a\n# manifest\n# template: b.yaml\n# has: d.json\n# fails: c: d\n# An agent: one.\na: 1\n# namespace: z\n";
        let case = Case::of("deploy/chart/ci/x.yaml", text);
        let expected = Case {
            file: "deploy/chart/ci/x.yaml".to_owned(),
            namespace: "a".to_owned(),
            is_manifest: true,
            template: Some("b.yaml".to_owned()),
            has: vec!["d.json".to_owned()],
            fails: Some("c: d".to_owned()),
            about: vec!["An agent: one.".to_owned()],
        };
        assert_eq!(case, expected);
        assert_eq!(case.manifest(), "x.yaml");
    }

    #[test]
    fn plain_manifests_have_no_helm_lines() {
        let case = Case::of("a.yaml", "# An agent.\n");
        let rendered =
            "---\n# Source: adit/a.yaml\nlabels:\n  helm.sh/chart: adit-0.1.0\n  app: x\n";
        let plain = case.plain(rendered);
        assert_eq!(
            plain,
            "# An agent.\n# `cargo xtask chart` writes this file from a.yaml.\n---\nlabels:\n  app: x\n"
        );
    }

    #[test]
    fn the_page_of_values_is_current() {
        let workspace = Workspace::here().unwrap();
        let page = values::readme(&workspace).unwrap();
        assert_eq!(workspace.text(values::README).unwrap().unwrap(), page);
        values::matches_schema(&workspace).unwrap();
    }
}
