package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"github.com/ollama/ollama/api"
	"github.com/ollama/ollama/parser"
	"github.com/ollama/ollama/template"
)

type talk struct {
	Messages []api.Message `json:"messages"`
	Expected string        `json:"expected"`
}
type row struct {
	Name      string   `json:"name"`
	Modelfile string   `json:"modelfile"`
	Stops     []string `json:"stops"`
	Talks     []talk   `json:"talks"`
}

func main() {
	scanner := bufio.NewScanner(os.Stdin)
	scanner.Buffer(make([]byte, 1<<24), 1<<24)
	for scanner.Scan() {
		var r row
		if err := json.Unmarshal(scanner.Bytes(), &r); err != nil {
			panic(err)
		}
		f, err := parser.ParseFile(strings.NewReader(r.Modelfile))
		if err != nil {
			fmt.Println(r.Name, "PARSE", err)
			continue
		}
		var stops []string
		text := ""
		for _, c := range f.Commands {
			if c.Name == "stop" {
				stops = append(stops, c.Args)
			}
			if c.Name == "template" {
				text = c.Args
			}
		}
		same := len(stops) == len(r.Stops)
		for i := range stops {
			same = same && stops[i] == r.Stops[i]
		}
		t, err := template.Parse(text)
		if err != nil {
			fmt.Println(r.Name, "TEMPLATE", err)
			continue
		}
		right := 0
		for _, k := range r.Talks {
			var b bytes.Buffer
			if err := t.Execute(&b, template.Values{Messages: k.Messages}); err != nil {
				fmt.Println(r.Name, "EXECUTE", err)
				continue
			}
			if b.String() == k.Expected {
				right++
			} else {
				fmt.Printf("%s differs: %q is not %q\n", r.Name, b.String(), k.Expected)
			}
		}
		fmt.Println(r.Name, right, "of", len(r.Talks), "stops", same)
	}
}
