package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// process is one whose memory and CPU time count.
type process struct {
	role string
	id   int
}

// processes collects flags.
type processes []process

func (p *processes) String() string { return "" }

// Set takes ROLE=PID.
func (p *processes) Set(text string) error {
	role, number, _ := strings.Cut(text, "=")
	id, err := strconv.Atoi(number)
	if err != nil {
		return fmt.Errorf("%q: write ROLE=PID", text)
	}
	*p = append(*p, process{role, id})
	return nil
}

// residentKiB is the resident memory of each process.
func (p processes) residentKiB() ([]float64, error) {
	all := make([]float64, 0, len(p))
	for _, one := range p {
		kib, err := field(fmt.Sprintf("/proc/%d/status", one.id), "VmRSS:", 0)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", one.role, err)
		}
		all = append(all, kib)
	}
	return all, nil
}

// ticksPerSecond is USER_HZ, which Linux fixes at 100 for everything it shows to programs.
const ticksPerSecond = 100

// cpuSeconds is user and system time of all processes together.
func (p processes) cpuSeconds() (float64, error) {
	total := 0.0
	for _, one := range p {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", one.id))
		if err != nil {
			return 0, fmt.Errorf("%s: %w", one.role, err)
		}
		// The name may hold blanks and brackets: fields are counted behind its last bracket.
		text := string(stat)
		fields := strings.Fields(text[strings.LastIndex(text, ")")+1:])
		if len(fields) < 13 {
			return 0, fmt.Errorf("%s: odd stat", one.role)
		}
		for _, ticks := range fields[11:13] {
			count, err := strconv.ParseFloat(ticks, 64)
			if err != nil {
				return 0, err
			}
			total += count / ticksPerSecond
		}
	}
	return total, nil
}

// field is a number on the line that begins with a name, counted from 0.
func field(path, name string, at int) (float64, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		rest, found := strings.CutPrefix(line, name)
		if fields := strings.Fields(rest); found && len(fields) > at {
			return strconv.ParseFloat(fields[at], 64)
		}
	}
	return 0, fmt.Errorf("%s has no %q", path, name)
}
