// Reads a dashboard strictly by the schema of Grafana, for `cargo xtask monitoring`: fields that Grafana does not know, lacks or has
// with another type are errors.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
)

func main() {
	if err := check(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func check(args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("the only argument is the dashboard, not %q", args)
	}
	text, err := os.ReadFile(args[0])
	if err != nil {
		return err
	}
	// Kinds of panels and queries.
	plugins.RegisterDefaultPlugins()
	var strict, read dashboard.Dashboard
	// A valid dashboard gives an empty list of errors that is not nil, and no panels: the second reading has the panels.
	var flaws cog.BuildErrors
	if err := strict.UnmarshalJSONStrict(text); err != nil && (!errors.As(err, &flaws) || len(flaws) > 0) {
		return err
	}
	if err := json.Unmarshal(text, &read); err != nil {
		return err
	}
	for _, panel := range read.Panels {
		if panel.Panel == nil {
			continue
		}
		if _, known := cog.ConfigForPanelcfgVariant(panel.Panel.Type); !known {
			return fmt.Errorf("no panel is of the type %q", panel.Panel.Type)
		}
	}
	return read.Validate()
}
